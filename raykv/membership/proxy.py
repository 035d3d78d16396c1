"""A proxy through which a node without Ray calls the directory.

The proxy server runs in the process that supervises the node, and listens on the loopback interface. The server serves
only this node. The node must prove that it knows the cluster's secret. A directory without Ray can serve all nodes.
"""

import math
import time
from typing import Final, TypeVar

from raykv.errors import RayKVError, TransientError, UsageError
from raykv.membership.membership import MembershipPort
from raykv.protocol import codec, messages
from raykv.transport.base import Reply, Session
from raykv.transport.link import Link
from raykv.types import NodeId

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

    def __init__(self, address: str, secret: bytes, *, answer_s: float = ANSWER_S) -> None:
        """Use the proxy server at `address` ("host:port"). `answer_s`: how long one call waits at most."""
        self._address, self._secret, self._answer_s = address, secret, answer_s

    def beat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatAnswer:
        return self._call(heartbeat, messages.HeartbeatAnswer)

    def configure(self, change: messages.Configure) -> bytes:
        return self._call(change, messages.Configured).registry

    def leave(self, node_id: NodeId) -> None:
        self._call(messages.Leave(node_id), messages.Done)

    def _call(self, request: messages.Message, kind: type[T]) -> T:
        deadline_s = time.monotonic() + self._answer_s
        link = Link.connect(self._address, self._secret, deadline_s=deadline_s)
        try:
            return codec.expect(kind, link.call(request, deadline_s=deadline_s))
        finally:
            link.close()
