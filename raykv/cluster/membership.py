"""How the nodes of a Ray cluster reach the directory actor: over a connection of their own, or else through Ray.

After a partition, Ray's connections stay silent until TCP sends lost packets again, which may take as long as the
partition has lasted. A new connection works at once. Ray tells where the actor listens.
"""

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ray

from raykv.config import ClusterConfig
from raykv.errors import PeerUnavailable, RayKVError
from raykv.membership.membership import MembershipPort
from raykv.membership.proxy import MembershipProxy, MembershipProxyServer
from raykv.protocol.keyring import SECRET_NBYTES
from raykv.protocol.messages import Configure, Heartbeat, HeartbeatAnswer
from raykv.protocol.placement import MAX_MEMBERS
from raykv.transport.server import SocketServer
from raykv.types import NodeId

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

NAMESPACE: Final = "raykv"
"""The Ray namespace of all actors of raykv."""
CALL_TIMEOUT_S: Final = 3.0
"""A call through Ray waits at most this long."""
CONNECTION_TIMEOUT_S: Final = 1.0
"""A call over TCP waits at most this long."""


class Endpoint(NamedTuple):
    """Where the directory actor listens, and the secret of this listener. A restarted actor has a new one."""

    address: str
    secret: bytes


def directory_name(cluster: str) -> str:
    return f"raykv:{cluster}:directory"


def open_endpoint(membership: MembershipPort, cluster: ClusterConfig) -> tuple[SocketServer, Endpoint]:
    """Serve `membership` to all nodes over TCP, on the address of this Ray node. The caller closes the server."""
    secret = secrets.token_bytes(SECRET_NBYTES)
    server = SocketServer(
        MembershipProxyServer(_WithoutKeyring(membership), None),
        f"{ray.util.get_node_ip_address()}:0",
        secret,
        io_timeout_s=CALL_TIMEOUT_S,
        max_connections=MAX_MEMBERS,
        tls=_tls(cluster),
    )
    server.serve()
    return server, Endpoint(server.address, secret)


def _tls(cluster: ClusterConfig) -> "Tls | None":
    if cluster.tls is None:
        return None
    from raykv.transport.tls import Tls  # imported late: most clusters have no TLS

    return Tls(cluster.tls)


class _WithoutKeyring:
    """Passes calls on, but no secrets of the cluster: without TLS, the connection is sealed, but not encrypted."""

    def __init__(self, membership: MembershipPort) -> None:
        self._membership = membership
        self.configure, self.leave = membership.configure, membership.leave

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Raise PeerUnavailable if node and directory know different secrets."""
        answer = self._membership.beat(heartbeat)
        if answer.keyring is not None or answer.want_keyring:
            raise PeerUnavailable("secrets are exchanged through Ray")
        return answer


class RayMembership:
    """A `MembershipPort` that calls the directory actor. Thread-safe."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._name, self._tls = directory_name(cluster.name), _tls(cluster)
        self._handle: Any = None
        self._proxy: MembershipProxy | None = None

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        answer: HeartbeatAnswer = self._call("beat", heartbeat, through_ray=heartbeat.keyring is not None)
        return answer

    def configure(self, change: Configure) -> bytes:
        changed: bytes = self._call("configure", change)
        return changed

    def leave(self, node_id: NodeId) -> None:
        self._call("leave", node_id)

    def _call(self, method: str, *arguments: Any, through_ray: bool = False) -> Any:
        proxy = self._proxy
        if proxy is not None and not through_ray:
            try:
                return getattr(proxy, method)(*arguments)
            except PeerUnavailable:  # partition, new endpoint, or other secrets
                pass
        answer = self._ask(method, *arguments)
        self._find_endpoint()
        return answer

    def _find_endpoint(self) -> None:
        """Ask Ray where the actor listens. An actor of an earlier version does not, until it is upgraded."""
        if hasattr(self._handle, "endpoint"):
            with suppress(PeerUnavailable):
                endpoint: Endpoint = self._ask("endpoint")
                self._proxy = MembershipProxy(
                    endpoint.address, endpoint.secret, answer_s=CONNECTION_TIMEOUT_S, tls=self._tls
                )

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the directory actor through Ray."""
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RayKVError):  # the directory has refused the call
                raise cause from None
            self._handle = None
            raise PeerUnavailable(f"the directory is away: {error}") from error
