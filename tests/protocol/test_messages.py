"""Messages and their bytes."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.errors import CapacityError, LostError, NamespaceMismatch, PeerUnavailable, ProtocolError, UsageError
from raykv.protocol import messages
from raykv.protocol.placement import Member, View

VIEW = View(3, (Member("a", "h", "x:1", "unix:/x", 1.5, 7), Member("b", "h", "x:2", "unix:/y", 0.5, 1 << 60)))
EXAMPLES = [
    messages.Attach(),
    messages.GetView(),
    messages.OpenNamespace(b"{}", 5),
    messages.Reserve(b"digest", b"keys", 4096, False, b"parent", 9),
    messages.Lend(b"digest", 4096, 3, 7, b"keys", b"parent"),
    messages.Store(b"digest", b"keys", 4096, b"rows", b"sums", b"places", False, b"parent", 9, 7, 60.0, -3),
    messages.Commit(b"rows", b"sums"),
    messages.Abort(b"rows"),
    messages.Pin(b"keys"),
    messages.Unpin(b"rows"),
    messages.Promote(b"keys", 1.5),
    messages.Delete(b"keys"),
    messages.Suspect(b"keys"),
    messages.Locate(b"keys"),
    messages.Announce("a", b"added", b"removed", b"cold"),
    messages.Read(b"keys", True),
    messages.Write(b"digest", b"keys", 4096, False, b"parent", 9, 60.0, -3),
    messages.Hint(b"keys", 60.0, -3, True, True, 512),
    messages.Configure(b"{}", b'{"ttl_s": 1}', True, b"{}"),
    messages.Adopt(b"{}", b"digest"),
    messages.Configured(b"{}", 3, "why not"),
    messages.Report(b"digest", {"evicted": 3}, (0, 1), (2,)),
    messages.Why(b"keys"),
    messages.GetNamespaces(),
    messages.Told(b"p", b"n", b"r", b"t", b"a", b"o", b"k", ("lru",), 1.5),
    messages.NamespacesAre(b"{}"),
    messages.Record(b"requests"),
    messages.TakeRecord(True),
    messages.Recorded(b"requests", 3, True),
    messages.Beat(VIEW.members[0], 3, VIEW, 5, b"{}"),
    messages.Beaten(VIEW, True, b"{}", True, "away"),
    messages.Leave("a"),
    messages.GetStats(),
    messages.Done(),
    messages.Count(3),
    messages.Attached("a", "h", 7, "/t", "/a", b"secret", True),
    messages.ViewIs(VIEW),
    messages.Granted(b"p", b"r", b"o", 2),
    messages.Lent(b"r", b"o"),
    messages.Stored(b"u", b"r", b"o"),
    messages.Held(b"r", b"o", b"n", b"c"),
    messages.Located((("a", "b"), ("b",)), b"places", b"cold"),
    messages.Reading(b"n", b"c", (("a",), ("b", "a")), b"places"),
    messages.Stats(b"{}"),
    messages.Failure("UsageError", "no"),
]


def taken_apart(raw: bytes) -> tuple[int, messages.Message]:
    epoch, length = messages.decode_header(raw[: messages.HEADER.size])
    assert length == len(raw) - messages.HEADER.size
    return epoch, messages.decode(raw[messages.HEADER.size :])


def test_every_kind_of_message_is_an_example():
    assert {type(message) for message in EXAMPLES} == set((messages.Request | messages.Answer).__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert taken_apart(messages.encode(message, 17)) == (17, message)
    defaults = {field.name: field.default for field in msgspec.structs.fields(message)}
    assert all(getattr(message, name) != default for name, default in defaults.items()), "says nothing about a field"


def test_every_cut_of_a_message_is_refused():
    for message in EXAMPLES:
        body = messages.encode(message, 0)[messages.HEADER.size :]
        for stop in range(len(body)):
            with pytest.raises(ProtocolError):
                messages.decode(body[:stop])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw):
    with pytest.raises(ProtocolError):
        messages.decode(raw)
    if len(raw) >= messages.HEADER.size:
        with pytest.raises(ProtocolError):
            messages.decode_header(raw[: messages.HEADER.size])


def test_messages_with_a_byte_changed_are_messages_or_refused(rng: random.Random):
    for _ in range(3000):
        body = bytearray(messages.encode(rng.choice(EXAMPLES), 0)[messages.HEADER.size :])
        body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            assert isinstance(messages.decode(body), messages.Message)
        except ProtocolError:
            pass


@pytest.mark.parametrize("body", [b"\x91" * 100_000, b"\x82\xa4type\xa6Attach\xa1z" + b"\x91" * 100_000])
def test_nesting_without_end_is_refused(body):
    with pytest.raises(ProtocolError):
        messages.decode(body)


def test_headers_that_are_refused():
    good = bytearray(messages.encode(messages.Done(), 5)[: messages.HEADER.size])
    with pytest.raises(ProtocolError, match="not a raykv message"):
        messages.decode_header(b"GE" + good[2:])
    with pytest.raises(ProtocolError, match=f"version 9, we speak {messages.VERSION}"):
        messages.decode_header(good[:2] + b"\x09" + good[3:])
    with pytest.raises(ProtocolError, match="at most"):
        messages.decode_header(messages.HEADER.pack(b"RK", messages.VERSION, 0, 0, messages.MAX_MESSAGE_NBYTES + 1))


def test_messages_that_are_too_long_are_not_sent():
    with pytest.raises(UsageError, match="fewer keys"):
        messages.encode(messages.Read(bytes(messages.MAX_MESSAGE_NBYTES)), 0)


@pytest.mark.parametrize("kind", [UsageError, NamespaceMismatch, CapacityError, LostError, ProtocolError])
def test_errors_travel_as_what_they_are(kind):
    with pytest.raises(kind, match="words") as caught:
        messages.raise_failure(messages.failure(kind("words")))
    assert type(caught.value) is kind


def test_errors_that_are_nobody_elses_business_travel_as_another():
    with pytest.raises(UsageError):
        messages.raise_failure(messages.failure(PeerUnavailable("somewhere")))
    with pytest.raises(ProtocolError):
        messages.raise_failure(messages.Failure("SystemExit", "run this"))


def test_the_greeting():
    nonce = bytes(range(32))
    assert messages.read_greeting(messages.greeting(nonce)) == nonce
    with pytest.raises(ProtocolError, match="does not speak raykv"):
        messages.read_greeting(b"x" * messages.GREETING.size)
    with pytest.raises(ProtocolError, match="upgrade the older one"):
        messages.read_greeting(messages.GREETING.pack(messages.GREETING_MAGIC, messages.VERSION + 1, nonce))


def test_a_proof_depends_on_all_that_goes_in():
    base = (b"secret", "asking", b"a" * 32, b"b" * 32)
    others = [(b"other", *base[1:]), (base[0], "answering", *base[2:]), (*base[:2], base[3], base[2])]
    assert len({messages.proof(*each) for each in (base, *others)}) == 4
    assert len(messages.proof(*base)) == messages.PROOF_NBYTES


@given(st.lists(st.booleans()))
def test_bits_travel(bits):
    raw = messages.pack_bits(np.array(bits, np.bool_))
    assert messages.unpack_bits(raw, len(bits)).tolist() == bits
    assert bool(raw) is any(bits)
    assert messages.pack_bits(None) == b""


def test_bits_of_another_number_are_refused():
    with pytest.raises(ProtocolError, match="2 bytes where 8 bits were due"):
        messages.unpack_bits(b"ab", 8)
