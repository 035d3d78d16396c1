"""Messages and their bytes."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv import wire
from raykv.errors import CapacityError, LostError, NamespaceMismatch, PeerUnavailable, ProtocolError, UsageError
from raykv.ring import Member, View

VIEW = View(3, (Member("a", "h", "x:1", "unix:/x", 1.5, 7), Member("b", "h", "x:2", "unix:/y", 0.5, 1 << 60)))
EXAMPLES = [
    wire.Attach(),
    wire.GetView(),
    wire.OpenNamespace(b"{}", 5),
    wire.Reserve(b"digest", b"keys", 4096, False, b"parent", 9),
    wire.Lend(b"digest", 4096, 3, 7, b"keys", b"parent"),
    wire.Store(b"digest", b"keys", 4096, b"rows", b"sums", b"places", False, b"parent", 9, 7, 60.0, -3),
    wire.Commit(b"rows", b"sums"),
    wire.Abort(b"rows"),
    wire.Pin(b"keys"),
    wire.Unpin(b"rows"),
    wire.Promote(b"keys", 1.5),
    wire.Delete(b"keys"),
    wire.Suspect(b"keys"),
    wire.Locate(b"keys"),
    wire.Announce("a", b"added", b"removed", b"cold"),
    wire.Read(b"keys", True),
    wire.Write(b"digest", b"keys", 4096, False, b"parent", 9, 60.0, -3),
    wire.Hint(b"keys", 60.0, -3, True, True, 512),
    wire.Configure(b"{}", b'{"ttl_s": 1}', True, b"{}"),
    wire.Adopt(b"{}", b"digest"),
    wire.Configured(b"{}", 3, "why not"),
    wire.Report(b"digest", {"evicted": 3}, (0, 1), (2,)),
    wire.Why(b"keys"),
    wire.GetNamespaces(),
    wire.Told(b"p", b"n", b"r", b"t", b"a", b"o", b"k", ("lru",), 1.5),
    wire.NamespacesAre(b"{}"),
    wire.Record(b"requests"),
    wire.TakeRecord(True),
    wire.Recorded(b"requests", 3, True),
    wire.Beat(VIEW.members[0], 3, VIEW, 5, b"{}"),
    wire.Beaten(VIEW, True, b"{}", True, "away"),
    wire.Leave("a"),
    wire.GetStats(),
    wire.Done(),
    wire.Count(3),
    wire.Attached("a", "h", 7, "/t", "/a", b"secret", True),
    wire.ViewIs(VIEW),
    wire.Granted(b"p", b"r", b"o", 2),
    wire.Lent(b"r", b"o"),
    wire.Stored(b"u", b"r", b"o"),
    wire.Held(b"r", b"o", b"n", b"c"),
    wire.Located((("a", "b"), ("b",)), b"places", b"cold"),
    wire.Reading(b"n", b"c", (("a",), ("b", "a")), b"places"),
    wire.Stats(b"{}"),
    wire.Failure("UsageError", "no"),
]


def taken_apart(raw: bytes) -> tuple[int, wire.Message]:
    epoch, length = wire.decode_header(raw[: wire.HEADER.size])
    assert length == len(raw) - wire.HEADER.size
    return epoch, wire.decode(raw[wire.HEADER.size :])


def test_every_kind_of_message_is_an_example():
    assert {type(message) for message in EXAMPLES} == set((wire.Request | wire.Answer).__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert taken_apart(wire.encode(message, 17)) == (17, message)
    defaults = {field.name: field.default for field in msgspec.structs.fields(message)}
    assert all(getattr(message, name) != default for name, default in defaults.items()), "says nothing about a field"


def test_every_cut_of_a_message_is_refused():
    for message in EXAMPLES:
        body = wire.encode(message, 0)[wire.HEADER.size :]
        for stop in range(len(body)):
            with pytest.raises(ProtocolError):
                wire.decode(body[:stop])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw):
    with pytest.raises(ProtocolError):
        wire.decode(raw)
    if len(raw) >= wire.HEADER.size:
        with pytest.raises(ProtocolError):
            wire.decode_header(raw[: wire.HEADER.size])


def test_messages_with_a_byte_changed_are_messages_or_refused(rng: random.Random):
    for _ in range(3000):
        body = bytearray(wire.encode(rng.choice(EXAMPLES), 0)[wire.HEADER.size :])
        body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            assert isinstance(wire.decode(body), wire.Message)
        except ProtocolError:
            pass


@pytest.mark.parametrize("body", [b"\x91" * 100_000, b"\x82\xa4type\xa6Attach\xa1z" + b"\x91" * 100_000])
def test_nesting_without_end_is_refused(body):
    with pytest.raises(ProtocolError):
        wire.decode(body)


def test_headers_that_are_refused():
    good = bytearray(wire.encode(wire.Done(), 5)[: wire.HEADER.size])
    with pytest.raises(ProtocolError, match="not a raykv message"):
        wire.decode_header(b"GE" + good[2:])
    with pytest.raises(ProtocolError, match=f"version 9, we speak {wire.VERSION}"):
        wire.decode_header(good[:2] + b"\x09" + good[3:])
    with pytest.raises(ProtocolError, match="at most"):
        wire.decode_header(wire.HEADER.pack(b"RK", wire.VERSION, 0, 0, wire.MAX_MESSAGE_NBYTES + 1))


def test_messages_that_are_too_long_are_not_sent():
    with pytest.raises(UsageError, match="fewer keys"):
        wire.encode(wire.Read(bytes(wire.MAX_MESSAGE_NBYTES)), 0)


@pytest.mark.parametrize("kind", [UsageError, NamespaceMismatch, CapacityError, LostError, ProtocolError])
def test_errors_travel_as_what_they_are(kind):
    with pytest.raises(kind, match="words") as caught:
        wire.raise_failure(wire.failure(kind("words")))
    assert type(caught.value) is kind


def test_errors_that_are_nobody_elses_business_travel_as_another():
    with pytest.raises(UsageError):
        wire.raise_failure(wire.failure(PeerUnavailable("somewhere")))
    with pytest.raises(ProtocolError):
        wire.raise_failure(wire.Failure("SystemExit", "run this"))


def test_the_greeting():
    nonce = bytes(range(32))
    assert wire.read_greeting(wire.greeting(nonce)) == nonce
    with pytest.raises(ProtocolError, match="does not speak raykv"):
        wire.read_greeting(b"x" * wire.GREETING.size)
    with pytest.raises(ProtocolError, match="upgrade the older one"):
        wire.read_greeting(wire.GREETING.pack(wire.GREETING_MAGIC, wire.VERSION + 1, nonce))


def test_a_proof_depends_on_all_that_goes_in():
    base = (b"secret", "asking", b"a" * 32, b"b" * 32)
    others = [(b"other", *base[1:]), (base[0], "answering", *base[2:]), (*base[:2], base[3], base[2])]
    assert len({wire.proof(*each) for each in (base, *others)}) == 4
    assert len(wire.proof(*base)) == wire.PROOF_NBYTES


@given(st.lists(st.booleans()))
def test_bits_travel(bits):
    raw = wire.pack_bits(np.array(bits, np.bool_))
    assert wire.unpack_bits(raw, len(bits)).tolist() == bits
    assert bool(raw) is any(bits)
    assert wire.pack_bits(None) == b""


def test_bits_of_another_number_are_refused():
    with pytest.raises(ProtocolError, match="2 bytes where 8 bits were due"):
        wire.unpack_bits(b"ab", 8)
