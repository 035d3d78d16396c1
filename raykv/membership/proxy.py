"""A proxy through which a node without Ray calls the directory.

The proxy server runs in the process that owns the node, and listens on the loopback interface. It serves only this
node. The directory has such a server, too, for the owners of all nodes. A caller must prove that it knows the server's
secret.
"""

import math
import time
from typing import TYPE_CHECKING, Final, TypeVar

from raykv.errors import RayKVError, TransientError, UsageError
from raykv.membership.membership import MembershipPort
from raykv.protocol import codec, messages
from raykv.transport.base import Reply, Session
from raykv.transport.link import Link
from raykv.types import NodeId

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

T = TypeVar("T")

ANSWER_S: Final = 4.0
"""A node waits at most this many seconds for one call to the directory through the proxy."""


class _NoLeases:
    """The session of a connection to the proxy server. Such a connection has no leases."""

    patience_s = math.inf

    def close(self) -> None:
        pass


class MembershipProxyServer:
    """The service that forwards a node's calls to the directory. Thread-safe if its `MembershipPort` is thread-safe.

    Attributes:
        epoch: Epoch of the view. It is always 0, because the proxy has no view.
    """

    epoch = 0

    def __init__(self, membership: MembershipPort, node_id: NodeId | None) -> None:
        """Forward calls to `membership`, but only those of node `node_id`. None: those of all nodes."""
        self._membership, self._node_id = membership, node_id

    def session(self, *, local: bool) -> Session:
        return _NoLeases()

    def answer(self, request: messages.Message, session: Session) -> Reply:
        """Forward one call to the directory."""
        try:
            return Reply(self._answer(request))
        except TransientError as error:
            return Reply(messages.Unavailable(str(error)))
        except RayKVError as error:
            return Reply(codec.failure(error))

    def _answer(self, request: messages.Message) -> messages.Answer:
        match request:
            case messages.Heartbeat(member=member) if self._node_id in (None, member.node_id):
                return self._membership.beat(request)
            case messages.Configure():
                return messages.Configured(self._membership.configure(request))
            case messages.Leave() if self._node_id in (None, request.node_id):
                self._membership.leave(request.node_id)
                return messages.Done()
        raise UsageError(f"{type(request).__name__} is not for this proxy: it serves node {self._node_id!r} alone")


class MembershipProxy:
    """The node's end of the proxy: a `MembershipPort`. Thread-safe, because each call makes its own connection."""

    def __init__(self, address: str, secret: bytes, *, answer_s: float = ANSWER_S, tls: "Tls | None" = None) -> None:
        """Use a proxy server.

        Args:
            address: Its address ("host:port").
            secret: Its secret.
            answer_s: How long one call waits at most.
            tls: The certificates for TLS, if the server uses TLS.
        """
        self._address, self._secret, self._answer_s, self._tls = address, secret, answer_s, tls

    def beat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatAnswer:
        return self._call(heartbeat, messages.HeartbeatAnswer)

    def configure(self, change: messages.Configure) -> bytes:
        return self._call(change, messages.Configured).registry

    def leave(self, node_id: NodeId) -> None:
        self._call(messages.Leave(node_id), messages.Done)

    def _call(self, request: messages.Message, kind: type[T]) -> T:
        deadline_s = time.monotonic() + self._answer_s
        link = Link.connect(self._address, self._secret, deadline_s=deadline_s, tls=self._tls)
        try:
            return codec.expect(kind, link.call(request, deadline_s=deadline_s))
        finally:
            link.close()
