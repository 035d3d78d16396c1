"""A man in the middle, who does not know the secret, relays the handshake and then changes the conversation."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

import raykv
from raykv.errors import ProtocolError, RayKVError, TransientError
from raykv.memory.copying import checksum_of
from raykv.protocol import codec, messages
from raykv.protocol.keyring import KEY_ID_NBYTES
from raykv.transport.bulk_write import hashed
from raykv.transport.handshake import GREETING, PROOF_NBYTES
from raykv.transport.link import Link
from raykv.transport.seal import TAG_NBYTES, Seal
from tests.support.nodes import Peer, keys_of, running_node, wait_until
from tests.support.transports import SECRET, is_closed, member_stream, soon

PAGE = 4096
DIGEST = raykv.Namespace(model="m").group.digest
OF_CLIENT, OF_SERVER = GREETING.size + KEY_ID_NBYTES + PROOF_NBYTES, GREETING.size + PROOF_NBYTES + 1
"""Bytes of the handshake that each end sends."""


class Relay:
    """Accepts one connection, connects to the server, and passes bytes on, through `change` after the handshake.

    Attributes:
        address: Where the client connects.
        change: Takes whether the bytes go to the server, and the bytes. Returns what is passed on.
    """

    def __init__(self, server: str, change: Callable[[bool, bytes], bytes]) -> None:
        self._server, self.change = server, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        self.client, _ = self._listener.accept()
        host, _, port = self._server.rpartition(":")
        self.server = socket.create_connection((host, int(port)))
        for arguments in ((self.client, self.server, OF_CLIENT, True), (self.server, self.client, OF_SERVER, False)):
            thread = threading.Thread(target=self._pump, args=arguments)
            self._threads.append(thread)
            thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, handshake: int, to_server: bool) -> None:
        try:
            while raw := source.recv(handshake if handshake else 1 << 16):
                plain, handshake = min(len(raw), handshake), handshake - min(len(raw), handshake)
                target.sendall(raw[:plain] + (self.change(to_server, raw[plain:]) if raw[plain:] else b""))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for each in (self.client, self.server):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        for each in (self.client, self.server, self._listener):
            each.close()


def unchanged(to_server: bool, raw: bytes) -> bytes:
    return raw


@pytest.fixture
def node() -> Iterator[object]:
    with running_node(secret=SECRET, storage={"arena_nbytes": "1 MiB"}, io_timeout_s=0.3) as made:
        yield made
        assert made.failure is None


@pytest.fixture
def peer(node) -> Iterator[Peer]:
    """A client on the node's host that has stored the chunks "a" and "b"."""
    with closing(Peer(node).open()) as made:
        made.commit(made.filled(["a", "b"], PAGE))
        yield made


@contextmanager
def relayed(node, change: Callable[[bool, bytes], bytes] = unchanged) -> Iterator[tuple[Relay, Link]]:
    with (
        closing(Relay(node.member.address, change)) as relay,
        closing(Link.connect(relay.address, SECRET, deadline_s=soon())) as link,
    ):
        yield relay, link


def delete(names: list[str]) -> bytes:
    return codec.encode(messages.Delete(keys_of(names), group=DIGEST), 0, 1)


def test_an_honest_relay_is_not_noticed(node, peer):
    with relayed(node) as (_, link):
        for _ in range(3):
            assert isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)


@pytest.mark.parametrize("tag", [b"", bytes(TAG_NBYTES)], ids=["no tag", "a wrong tag"])
def test_a_relay_cannot_delete_chunks(node, peer, tag):
    with relayed(node) as (relay, _):
        wait_until(lambda: hasattr(relay, "server"))
        relay.server.sendall(delete(["a", "b"]) + tag)
        relay.server.shutdown(socket.SHUT_WR)
        wait_until(lambda: not node._servers[0]._connections)
    assert node.store.chunks == 2


def test_a_relay_cannot_repeat_a_request(node, peer):
    sent: list[bytes] = []

    def record(to_server: bool, raw: bytes) -> bytes:
        if to_server:
            sent.append(raw)
        return raw

    with relayed(node, record) as (relay, link):
        assert link.call(messages.Delete(keys_of(["a"]), group=DIGEST), deadline_s=soon()) == messages.Count(1)
        peer.commit(peer.filled(["a"], PAGE))
        relay.server.sendall(sent[0])
        wait_until(lambda: not node._servers[0]._connections)
    assert node.store.chunks == 2


def test_a_relay_cannot_send_a_message_of_another_session(node, peer):
    recorded: list[bytes] = []

    def record(to_server: bool, raw: bytes) -> bytes:
        if to_server:
            recorded.append(raw)
            return b""  # not passed on
        return raw

    with relayed(node, record) as (_, link):
        link.post(messages.Delete(keys_of(["a", "b"]), group=DIGEST), deadline_s=soon())
        wait_until(lambda: bool(recorded))
    with relayed(node) as (relay, _):
        wait_until(lambda: hasattr(relay, "server"))
        relay.server.sendall(recorded[0])
        wait_until(lambda: not node._servers[0]._connections)
    assert node.store.chunks == 2


def test_a_relay_cannot_exchange_two_requests(node, peer):
    held: list[bytes] = []

    def swap(to_server: bool, raw: bytes) -> bytes:
        if not to_server:
            return raw
        held.append(raw)
        return b"" if len(held) == 1 else held[1] + held[0]

    with relayed(node, swap) as (_, link):
        link.post(messages.GetView(), deadline_s=soon())
        wait_until(lambda: len(held) == 1)
        link.post(messages.Delete(keys_of(["a"]), group=DIGEST), deadline_s=soon())
        with pytest.raises(RayKVError):
            link.collect(deadline_s=soon())
    assert node.store.chunks == 2


def test_every_changed_bit_of_a_message_ends_the_connection(node, peer, rng: random.Random):
    length = len(delete(["a"])) + TAG_NBYTES
    for bit in rng.sample(range(8 * length), 40):

        def flip(to_server: bool, raw: bytes, bit: int = bit) -> bytes:
            if not to_server:
                return raw
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        with relayed(node, flip) as (_, link):
            with pytest.raises((ProtocolError, TransientError)):
                link.call(messages.Delete(keys_of(["a"]), group=DIGEST), deadline_s=soon(2.0))
            wait_until(lambda: not node._servers[0]._connections)
    assert node.store.chunks == 2


def test_a_client_refuses_changed_answers(node, peer):
    def lie(to_server: bool, raw: bytes) -> bytes:
        return raw if to_server else raw.replace(b"\x02", b"\x01")

    with relayed(node, lie) as (_, link), pytest.raises(ProtocolError):
        link.call(messages.Delete(keys_of(["a", "b"]), group=DIGEST), deadline_s=soon())


def test_a_client_refuses_its_own_messages_sent_back(node, peer):
    with relayed(node) as (relay, link):
        relay.change = lambda to_server, raw: relay.client.sendall(raw) or b"" if to_server else b""
        with pytest.raises(ProtocolError, match="seal"):
            link.call(messages.GetView(), deadline_s=soon())


def test_a_relay_cannot_store_other_bytes_with_their_checksums(node, peer):
    value = bytes(range(256)) * 16

    def poison(to_server: bool, raw: bytes) -> bytes:
        other = bytes(PAGE)
        right, wrong = (checksum_of([memoryview(each)]).to_bytes(8, "little") for each in (value, other))
        return raw.replace(value, other).replace(right, wrong) if to_server else raw

    checksums = bytearray()
    with relayed(node, poison) as (_, link), pytest.raises(RayKVError):
        link.push(
            messages.Write(keys_of(["c"]), PAGE, group=DIGEST),
            lambda answer: hashed([[memoryview(value)]], [0], checksums),
            lambda: messages.Checksums(bytes(checksums)),
            deadline_s=soon(2.0),
        )
    assert node.store.chunks == 2
    assert node.store.lent_nbytes == 0


def test_messages_over_unix_sockets_have_no_tag(node):
    for address, sealed in ((node.config.local_address, False), (node.member.address, True)):
        stream = member_stream(address)
        with stream.socket:
            assert (stream.seal is not None) == sealed


def test_a_member_with_a_wrong_tag_is_told_why(node):
    stream = member_stream(node.member.address)
    with stream.socket:
        stream.socket.sendall(codec.encode(messages.GetView(), 0, 1) + bytes(TAG_NBYTES))
        answer, _ = stream.message(soon())
        assert isinstance(answer, messages.Failure)
        assert "seal" in answer.text
        assert is_closed(stream.socket)


def test_tags_depend_on_the_secret_the_nonces_the_direction_and_the_number():
    def of_client(secret: bytes = b"s", nonces: bytes = b"n") -> Seal:
        return Seal.of_client(secret, nonces)

    tags = {of_client().tag(b"m"), of_client(b"t").tag(b"m"), of_client(nonces=b"o").tag(b"m"), of_client().tag(b"l")}
    tags.add(Seal.of_server(b"s", b"n").tag(b"m"))
    twice = of_client()
    tags |= {twice.tag(b"m"), twice.tag(b"m")}
    assert len(tags) == 6
    server = Seal.of_server(b"s", b"n")
    server.check(b"m", b"", of_client().tag(b"m"))
    with pytest.raises(ProtocolError):
        server.check(b"m", b"", of_client().tag(b"m"))
