"""A proxy to the directory for a node without Ray: the process that owns the node calls the directory for it.

The proxy server listens on the loopback interface and serves one node. The node must prove the cluster's secret.
"""

import time
from typing import Any, Final

import msgspec

from raykv.errors import PeerUnavailable, RayKVError, TransientError, UsageError
from raykv.membership.membership import HeartbeatAnswer, MembershipPort
from raykv.protocol import codec, messages
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.transport.base import Reply, Session
from raykv.transport.link import Link
from raykv.types import NodeId

ANSWER_S: Final = 4.0
"""Time limit for one call to the directory through the proxy."""


class _NoLeases:
    """The session of a connection to the proxy server. It has nothing to release."""

    def close(self) -> None:
        pass


class MembershipProxyServer:
    """The service that forwards a node's calls to the directory. Thread-safe if the `MembershipPort` is.

    Attributes:
        epoch: Always 0, since the proxy has no view.
    """

    epoch = 0

    def __init__(self, membership: MembershipPort, node_id: NodeId) -> None:
        """Args: node_id: The only node whose calls are forwarded."""
        self._membership, self._node_id = membership, node_id

    def session(self, *, local: bool) -> Session:
        return _NoLeases()

    def answer(self, request: messages.Message, session: Session) -> Reply:
        """Forward one call. If the directory does not answer, the reply's `problem` says why."""
        try:
            return Reply(self._answer(request))
        except TransientError as error:
            away = messages.Configured if isinstance(request, messages.Configure) else messages.HeartbeatAnswered
            return Reply(away(problem=str(error)))
        except RayKVError as error:
            return Reply(codec.failure(error))

    def _answer(self, request: messages.Message) -> messages.Answer:
        match request:
            case messages.Heartbeat(member=member) if member.node_id == self._node_id:
                found = self._membership.beat(
                    member, request.view_epoch, request.view, request.version, request.registry
                )
                return messages.HeartbeatAnswered(found.view, found.want_view, found.registry, found.want_registry)
            case messages.Configure():
                namespace = Namespace.load(codec.fields(request.namespace))
                fields = None if request.drop else codec.fields(request.fields)
                return messages.Configured(self._membership.configure(namespace, fields, request.registry))
            case messages.Leave() if request.node_id == self._node_id:
                self._membership.leave(request.node_id)
                return messages.Done()
        raise UsageError(f"{type(request).__name__} is not for this proxy: it serves node {self._node_id!r} alone")


class MembershipProxy:
    """The node's side of the proxy: a `MembershipPort`. Thread-safe, because each call makes its own connection."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Args: address: "host:port" of the proxy server."""
        self._address, self._secret = address, secret

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, registry: bytes | None = None
    ) -> HeartbeatAnswer:
        """See `MembershipPort`."""
        request = messages.Heartbeat(member=member, view_epoch=epoch, view=view, version=version, registry=registry)
        found = codec.expect(messages.HeartbeatAnswered, self._call(request))
        return HeartbeatAnswer(found.view, found.want_view, found.registry, found.want_registry)

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> bytes:
        """See `MembershipPort`."""
        name = namespace.model_dump_json(exclude_defaults=True).encode()
        changes = b"{}" if fields is None else msgspec.json.encode(fields)
        request = messages.Configure(namespace=name, fields=changes, drop=fields is None, registry=registry)
        return codec.expect(messages.Configured, self._call(request)).registry

    def leave(self, node_id: NodeId) -> None:
        """See `MembershipPort`."""
        self._call(messages.Leave(node_id=node_id))

    def _call(self, request: messages.Message) -> messages.Answer:
        deadline_s = time.monotonic() + ANSWER_S
        link = Link.connect(self._address, self._secret, deadline_s=deadline_s)
        try:
            answer = link.call(request, deadline_s=deadline_s)
        finally:
            link.close()
        if isinstance(answer, messages.HeartbeatAnswered | messages.Configured) and answer.problem:
            raise PeerUnavailable(answer.problem)
        return answer
