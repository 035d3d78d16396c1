"""Connections to a node that send hostile messages, and what must be true of the node afterwards."""

import time
from collections import Counter
from contextlib import suppress

from raykv.errors import RayKVError
from raykv.memory.recovery import require_sound
from raykv.node.node import Node
from raykv.protocol import codec, messages
from raykv.protocol.placement import Member
from raykv.transport.base import Reply
from tests.support import hostile, stores
from tests.support.nodes import Peer, content

PAGE = 4096
SESSIONS = 4


class Crowd:
    """A node that was not started, and connections to it that send hostile messages.

    Attributes:
        answers: Number of answers by type.
        bugs: Texts of the answers that report a bug of the node.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        node.member = Member("n", "h", {}, 1.0, 1)
        self.answers: Counter[str] = Counter()
        self.bugs: list[str] = []
        self._peers = [self.open(number) for number in range(SESSIONS)]

    def open(self, number: int) -> Peer:
        """Open connection `number`. Every second one is of a process of this host."""
        return Peer(self.node, local=number % 2 == 0).open()

    def peer(self, number: int) -> Peer:
        return self._peers[number]

    def send(self, peer: Peer, request: messages.Message, *, whole: bool, source: hostile.Source) -> None:
        """Send a request, and play the transport's part after it. `whole`: whether the connection survives."""
        try:
            reply = peer.reply(request)
        except RayKVError as error:
            self.answers[type(error).__name__] += 1
            if "internal error" in str(error):
                self.bugs.append(f"{request!r:.400}: {error}")
            return
        self.answers[type(reply.answer).__name__] += 1
        second = None
        try:
            if whole:
                whole = self._transfer(reply, source)
        finally:
            second = reply.finish(whole)
        assert second is None or isinstance(second, messages.Count | messages.Failure)

    def _transfer(self, reply: Reply, source: hostile.Source) -> bool:
        for piece in reply.outgoing:
            assert len(piece) > 0
        for run in reply.incoming:
            for view in run:
                view[:] = bytes(len(view))
        if reply.closing is None:
            return True
        kind = source.pick([messages.Checksums, messages.Checksums, messages.Pin])
        with suppress(RayKVError):
            reply.closing(hostile.structure(kind, source))
            return True
        return False

    def replace(self, number: int) -> None:
        """End a connection, and open it again."""
        self._peers[number].close()
        self._peers[number] = self.open(number)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def check_store(node: Node) -> None:
    """Check the store as recovery and the tests of the store do. Then let all quarantined slots go, and use it.

    The next heartbeat must be one that can be sent: an error there would end the node.
    """
    registry = node.reconciler.registry
    codec.encode(messages.Heartbeat(node.member, 0, version=registry.version, registry=registry.encode()), 0, 0)
    require_sound(node.store.table)
    stores.check(node.store)
    assert not node.store.table.columns.pins.any()
    assert node.store.lent_nbytes == 0
    node.store.allocator.release(now_s=time.monotonic() + 1e6)
    stores.check(node.store)
    peer = Peer(node).open()
    assert peer.ask(messages.Delete(hostile.keys_of(["good"]))) is not None
    (run,) = peer.commit(peer.filled(["good"], PAGE))
    assert not run.problem
    reply = peer.reply(messages.Read(hostile.keys_of(["good"])))
    assert b"".join(reply.outgoing) == content("good", PAGE)
    reply.finish(True)
    peer.close()
