"""Runs raykv on Ray. Ray places, starts and restarts the processes, and finds them by name. Ray carries no chunks."""

from raykv.cluster.control import drain, find_address, record, start, status, stop, undrain, upgrade

__all__ = ["drain", "find_address", "record", "start", "status", "stop", "undrain", "upgrade"]
