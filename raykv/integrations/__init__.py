"""Adapters for engines: the only package that imports torch or an engine, and that uses the engine's word `block`.

An adapter catches `RayKVError`, counts it, and lets the engine recompute.
"""
