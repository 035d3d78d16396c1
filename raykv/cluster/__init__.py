"""raykv on Ray: `start`, `stop`, `status`, `upgrade`.

Ray starts, places, names, watches and restarts processes. It never carries a chunk.
"""

from raykv.cluster.control import find_address, record, start, status, stop, upgrade

__all__ = ["find_address", "record", "start", "status", "stop", "upgrade"]
