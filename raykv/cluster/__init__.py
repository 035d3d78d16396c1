"""raykv on Ray: `start`, `stop`, `status`. Ray starts, places, names, watches and heals; it never carries a chunk."""

from raykv.cluster.control import find_address, start, status, stop

__all__ = ["find_address", "start", "status", "stop"]
