"""Runs raykv on Ray. Ray starts, places, names and restarts the processes. Chunks never pass through Ray."""

from raykv.cluster.control import find_address, record, start, status, stop, upgrade

__all__ = ["find_address", "record", "start", "status", "stop", "upgrade"]
