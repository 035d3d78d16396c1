"""Copies blocks between an engine's paged KV cache in GPU memory and chunks in the arena. See docs/gpu.md.

Only this package imports cupy, and only in `device.open_device`. The logic uses the interface `Device`, so that it runs
in tests without a GPU.
"""
