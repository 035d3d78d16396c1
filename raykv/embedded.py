"""A whole cluster in one process, without Ray: for notebooks, tests and demos."""

import secrets
import time
from typing import TYPE_CHECKING, Any, Self

from raykv.config import ClientConfig, NodeConfig, StorageConfig, TlsConfig
from raykv.membership.membership import InProcessMembership
from raykv.node.node import Node
from raykv.protocol.keyring import SECRET_NBYTES, Keyring
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from raykv.client.client import Client

__all__ = ["EmbeddedCluster", "InProcessMembership", "embedded"]


class EmbeddedCluster:
    """Nodes and their directory in this process. Requests to nodes go through real sockets.

    Attributes:
        membership: The directory, which keeps the list of members.
        nodes: All nodes, including killed nodes. A node's number is its index in this list.
    """

    def __init__(self, config: NodeConfig, *, separate_hosts: bool, member_timeout_s: float) -> None:
        """Use `raykv.embedded` instead. `config` applies to all nodes; `add` sets `node_id` and `host` of each node."""
        keyring = Keyring.first(secrets.token_bytes(SECRET_NBYTES))
        self._secret = keyring.current
        self._config, self._separate_hosts = config, separate_hosts
        self._clients: list[Client] = []
        self.membership = InProcessMembership(member_timeout_s=member_timeout_s, keyring=keyring)
        self.nodes: list[Node] = []

    @property
    def secret(self) -> str:
        """The cluster's secret, as hexadecimal text. Clients that connect by "host:port" need it."""
        keyring = self.membership.logic.keyring
        assert keyring is not None
        return keyring.current.hex()

    def add(self) -> int:
        """Start one more node. Returns its number."""
        number = len(self.nodes)
        host = f"host-{number}" if self._separate_hosts else None
        config = self._config.model_copy(update={"node_id": f"node-{number}", "host": host})
        node = Node(config, secret=self._secret, membership=self.membership)
        self.nodes.append(node)
        node.start()
        return number

    def client(self, namespace: Namespace, *, node: int = 0, **config: Any) -> "Client":
        """Make a client on the host of node number `node`, connected to this node. `config`: fields of ClientConfig."""
        from raykv.client.client import Client
        from raykv.client.router import Router

        made = Client(namespace, Router(ClientConfig.load({"address": self.address(node), **config})))
        self._clients.append(made)
        return made

    def address(self, node: int = 0) -> str:
        """Return the Unix socket address of a node, for processes of the same user on this machine."""
        return self.nodes[node].member.local_address

    def kill(self, node: int) -> None:
        """Stop a node without informing the directory, as in a crash. Anonymous memory is freed; memory files stay."""
        self.nodes[node].stop(leave=False)

    def settle(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all live nodes have the directory's view, and have announced all their chunks to the owners.

        This also waits until the view contains all live nodes and no other node.

        Raises:
            TimeoutError: The nodes are not ready within `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            living = [node for node in self.nodes if not node.stopped]
            view = self.membership.logic.view
            names = {node.config.node_id for node in living}
            if {member.node_id for member in view.members} == names and all(
                node.view.epoch == view.epoch and node.announced for node in living
            ):
                return
            time.sleep(0.01)
        raise TimeoutError(f"the nodes do not agree on the view within {timeout_s} s")

    def close(self) -> None:
        """Close all clients, stop all nodes, and free their memory."""
        for client in self._clients:
            client.close()
        for node in self.nodes:
            if not node.stopped:
                node.stop(unlink=True, leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def embedded(
    nodes: int = 1,
    *,
    arena_nbytes: int | str = "256 MiB",
    name: str = "embedded",
    separate_hosts: bool = True,
    heartbeat_s: float = 0.1,
    member_timeout_s: float = 1.0,
    tls: TlsConfig | None = None,
    **storage: Any,
) -> EmbeddedCluster:
    """Start a cluster in this process. The caller must close it, or use it in a `with` statement.

    Args:
        nodes: Number of nodes.
        arena_nbytes: Memory of each node, in bytes or as text such as "256 MiB".
        name: Name of the cluster.
        separate_hosts: Whether each node counts as a separate host. Then chunks travel between nodes through sockets.
        heartbeat_s: Time between two heartbeats of a node.
        member_timeout_s: A node without heartbeats for this long is removed from the view.
        tls: Certificates of all nodes and clients. None: no TLS.
        storage: Other fields of StorageConfig.
    """
    fields = {"arena_nbytes": arena_nbytes, "shm_dir": None, **storage}
    config = NodeConfig.load(
        {
            "cluster": name,
            "node_id": "node",
            "storage": StorageConfig.load(fields),
            "heartbeat_s": heartbeat_s,
            "tls": tls,
        }
    )
    cluster = EmbeddedCluster(config, separate_hosts=separate_hosts, member_timeout_s=member_timeout_s)
    try:
        for _ in range(nodes):
            cluster.add()
        cluster.settle()
    except BaseException:  # the caller gets no object that it could close
        cluster.close()
        raise
    return cluster
