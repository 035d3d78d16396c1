"""Runs raykv on Ray. Ray places, starts and restarts the processes, and finds them by name. Ray carries no chunks."""

from raykv.cluster.control import find_address, record, start, status, stop, upgrade

__all__ = ["find_address", "record", "start", "status", "stop", "upgrade"]
