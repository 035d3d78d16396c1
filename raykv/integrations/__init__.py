"""Adapters between raykv and the engines that use it.

Only here may torch or an engine be imported, only here does the engine's word `block` appear, and only here is
`RayKVError` caught: an adapter that meets one counts it and lets the engine recompute.
"""
