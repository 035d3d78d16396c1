"""Headers, bits, fields and failures are encoded and decoded. Wrong bytes are refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.errors import CapacityError, LostError, NamespaceMismatch, PeerUnavailable, ProtocolError, UsageError
from raykv.protocol import codec, messages


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw):
    with pytest.raises(ProtocolError):
        codec.decode(raw)
    if len(raw) >= codec.HEADER.size:
        with pytest.raises(ProtocolError):
            codec.decode_header(raw[: codec.HEADER.size])


@pytest.mark.parametrize("body", [b"\x91" * 100_000, b"\x82\xa4type\xa6Attach\xa1z" + b"\x91" * 100_000])
def test_nesting_without_end_is_refused(body):
    with pytest.raises(ProtocolError):
        codec.decode(body)


def test_headers_that_are_refused():
    good = bytearray(codec.encode(messages.Done(), 5, 6)[: codec.HEADER.size])
    with pytest.raises(ProtocolError, match="not a raykv message"):
        codec.decode_header(b"GE" + good[2:])
    with pytest.raises(ProtocolError, match=f"version 9, we speak {codec.VERSION}"):
        codec.decode_header(good[:2] + b"\x09" + good[3:])
    with pytest.raises(ProtocolError, match="at most"):
        codec.decode_header(codec.HEADER.pack(b"RK", codec.VERSION, 0, 0, 0, codec.MAX_MESSAGE_NBYTES + 1))


def test_numbers_in_a_header_wrap():
    header = codec.decode_header(codec.encode(messages.Done(), (1 << 32) + 3, (1 << 40) + 9)[: codec.HEADER.size])
    assert (header.epoch, header.request_id) == (3, 9)


def test_messages_that_are_too_long_are_not_sent():
    with pytest.raises(UsageError, match="fewer keys"):
        codec.encode(messages.Read(bytes(codec.MAX_MESSAGE_NBYTES)), 0, 0)


@pytest.mark.parametrize("kind", [UsageError, NamespaceMismatch, CapacityError, LostError, ProtocolError])
def test_errors_travel_as_what_they_are(kind):
    with pytest.raises(kind, match="words") as caught:
        codec.raise_failure(codec.failure(kind("words")))
    assert type(caught.value) is kind


def test_other_errors_travel_as_a_known_one():
    with pytest.raises(UsageError):
        codec.raise_failure(codec.failure(PeerUnavailable("somewhere")))
    with pytest.raises(ProtocolError):
        codec.raise_failure(messages.Failure("SystemExit", "run this"))


GROUP = {"config": {}, "get_counts": [1], "put_counts": []}
COUNTERS = {"arena_nbytes": 3, "used_nbytes": 2, "lent_nbytes": 1, "namespaces": {'{"model":"m"}': GROUP}, "more": None}


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {**COUNTERS, "namespaces": None},
        {**COUNTERS, "namespaces": {'{"model":"m"}': {}}},
        {**COUNTERS, "namespaces": {"m": GROUP}},
        {**COUNTERS, "namespaces": {'{"model":""}': GROUP}},
        {**COUNTERS, "namespaces": {'{"model":"m"}': {**GROUP, "get_counts": ["1"]}}},
        {**COUNTERS, "namespaces": {'{"model":"m"}': {**GROUP, "misses": {"evicted": None}}}},
        {"namespaces": {}},
    ],
    ids=range(8),
)
def test_counters_of_a_node_that_lack_something_are_refused(wrong):
    """A client works with the counters of all members. One member gone wrong must not end its calls with a KeyError."""
    assert codec.stats_in(messages.Stats(json.dumps(COUNTERS).encode())) == COUNTERS
    for raw in (json.dumps(wrong).encode(), b"", b"\xff", b"[" * 100_000):
        with pytest.raises(ProtocolError, match="counters"):
            codec.stats_in(messages.Stats(raw))
    with pytest.raises(ProtocolError, match="Done where Stats"):
        codec.stats_in(messages.Done())


def test_error_texts_of_a_peer_are_bounded():
    """They end up in logs and in errors of this process."""
    with pytest.raises(UsageError) as caught:
        codec.raise_failure(messages.Failure("UsageError", "x" * 100_000))
    assert len(str(caught.value)) <= codec.MAX_ERROR_CHARACTERS + 10


def test_error_texts_are_bounded():
    assert len(codec.failure(UsageError("x" * 1_000_000)).text) < 3000
    with pytest.raises(ProtocolError) as caught:
        codec.decode(b"\x81\xa4type\xdb" + (1_000_000).to_bytes(4, "big") + b"x" * 1_000_000)
    assert len(str(caught.value)) < 3000


@given(st.lists(st.booleans()))
def test_bits_travel(bits):
    raw = codec.pack_bits(np.array(bits, np.bool_))
    assert codec.unpack_bits(raw, len(bits)).tolist() == bits
    assert bool(raw) is any(bits)
    assert codec.pack_bits(None) == b""


def test_bits_of_another_number_are_refused():
    with pytest.raises(ProtocolError, match="2 bytes where 8 bits were due"):
        codec.unpack_bits(b"ab", 8)


@given(st.binary(max_size=50))
def test_fields_are_a_json_object_or_refused(text):
    try:
        assert isinstance(codec.fields(text), dict)
    except UsageError:
        pass


@pytest.mark.parametrize(
    "text", [b"\xff", b'{"model": "\xff"}', b'{"\xc3": 1}', b"[]", b"{", b"", b'{"a":' * 100_000, b"\xed\xa0\x80"]
)
def test_fields_that_are_refused(text):
    with pytest.raises(UsageError, match="JSON object in UTF-8"):
        codec.fields(text)
