"""Adapters for inference engines. Only this package imports torch or an engine.

An adapter catches `RayKVError`, counts it, and lets the engine recompute.
"""
