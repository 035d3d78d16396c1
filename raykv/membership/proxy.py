"""The directory through another process: a node without Ray asks the process around it, which asks for it.

It is heard on the loopback interface, by whoever proves the cluster's secret, and speaks for one node alone.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from raykv.errors import PeerUnavailable, RayKVError, TransientError, UsageError
from raykv.membership.membership import DirectoryPort, Pulse
from raykv.protocol import messages
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.transport.base import Reply, Session
from raykv.transport.tcp import SocketLink
from raykv.types import NodeId

ASK_S: Final = 4.0
"""The directory has so long to answer, its way through the relay included."""


class _NoLeases:
    """What hangs on a connection to a relay: nothing."""

    def close(self) -> None:
        pass


class Relay:
    """The answering end: a service around a directory. Thread-safe if that is.

    Attributes:
        epoch: 0: it has no view of its own.
    """

    epoch = 0
    joined: frozenset[type[messages.Message]] = frozenset()

    def __init__(self, directory: DirectoryPort, node_id: NodeId) -> None:
        """Args: node_id: The only node whose beats are passed on."""
        self._directory, self._node_id = directory, node_id

    def session(self, *, local: bool) -> Session:
        return _NoLeases()

    def answer(self, request: messages.Message, session: Session) -> Reply:
        """Ask the directory. That it is away is an answer, too."""
        try:
            return Reply(self._answer(request))
        except RayKVError as error:
            return Reply(messages.failure(error))

    def answer_joined(self, requests: Sequence[messages.Message], session: Session) -> list[messages.Answer]:
        """One by one."""
        return [self.answer(request, session).answer for request in requests]

    def _answer(self, request: messages.Message) -> messages.Answer:
        directory = self._directory
        try:
            match request:
                case messages.Beat() if request.member.node_id == self._node_id:
                    pulse = directory.beat(
                        request.member, request.view_epoch, request.view, request.version, request.register
                    )
                    return messages.Beaten(pulse.view, pulse.tell_view, pulse.register, pulse.tell_register)
                case messages.Configure():
                    namespace = Namespace.load(messages.fields(request.namespace))
                    fields = None if request.drop else messages.fields(request.fields)
                    return messages.Configured(directory.configure(namespace, fields, request.register))
                case messages.Leave() if request.node_id == self._node_id:
                    directory.leave(request.node_id)
                    return messages.Done()
        except TransientError as error:
            problem = str(error)
            return (
                messages.Configured(problem=problem)
                if isinstance(request, messages.Configure)
                else messages.Beaten(problem=problem)
            )
        raise UsageError(f"{type(request).__name__} is not for this relay: it asks the directory for {self._node_id!r}")


class RelayedDirectory:
    """The asking end: a `DirectoryPort` for a node. Thread-safe: each call has a connection of its own."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Args: address: Of the relay, "host:port"."""
        self._address, self._secret = address, secret

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, register: bytes | None = None
    ) -> Pulse:
        """See `DirectoryPort`."""
        told = self._ask(messages.Beat(member, epoch, view, version, register))
        return Pulse(told.view, told.tell_view, told.register, told.tell_register)

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, register: bytes | None = None) -> bytes:
        """See `DirectoryPort`."""
        name = namespace.model_dump_json(exclude_defaults=True).encode()
        changes = b"{}" if fields is None else msgspec.json.encode(fields)
        answer = self._call(messages.Configure(name, changes, fields is None, register))
        configured = messages.expect(messages.Configured, answer)
        if configured.problem:
            raise PeerUnavailable(configured.problem)
        return configured.register

    def leave(self, node_id: NodeId) -> None:
        """See `DirectoryPort`."""
        answer = self._call(messages.Leave(node_id))
        if isinstance(answer, messages.Beaten):
            raise PeerUnavailable(answer.problem)

    def _ask(self, request: messages.Beat) -> messages.Beaten:
        told = messages.expect(messages.Beaten, self._call(request))
        if told.problem:
            raise PeerUnavailable(told.problem)
        return told

    def _call(self, request: messages.Message) -> messages.Answer:
        deadline_s = time.monotonic() + ASK_S
        link = SocketLink.connect(self._address, self._secret, deadline_s=deadline_s)
        try:
            return link.call(request, deadline_s=deadline_s)
        finally:
            link.close()
