"""How a node reaches the other nodes: for requests over links, for chunk bytes over the best data path."""

from collections.abc import Callable

from raykv.protocol.placement import Member, View
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.data_path import DataPath, DataPaths, LinkPath, PathEnvironment
from raykv.transport.pool import ConnectionPool


class Peers:
    """The other nodes. Thread-safe.

    Attributes:
        pool: Links for requests. The node closes it.
        view: Returns the newest view that the node knows.
        environment: The parameters of the data paths.
    """

    def __init__(self, pool: ConnectionPool, view: Callable[[], View], *, host: str) -> None:
        """Reach other nodes over the pool's links. `host`: identity of the node's host."""
        self.pool, self.view = pool, view
        self.environment = PathEnvironment(pool, host, rdma=None)
        self._paths = DataPaths([LinkPath(self.environment)])

    def prefer(self, path: DataPath) -> None:
        """Prefer a further data path. `close` closes it."""
        self._paths.prefer(path)

    def write(self, member: Member, write: BulkWrite, *, deadline_s: float) -> int:
        """Send chunks to a node. Returns the number of chunks that the node has stored.

        Raises:
            RayKVError: The node does not answer, or refuses.
        """
        path = self._paths.choose(member, deadline_s=deadline_s, writes=True)
        return path.write(member, write, deadline_s=deadline_s)

    def close(self) -> None:
        """Close the data paths. The pool must be closed before."""
        self._paths.close()
