"""The buffer of recorded requests."""

import pytest

from raykv.errors import UsageError
from raykv.node.trace_buffer import MAX_BUFFER_KEYS, TraceBuffer
from raykv.protocol import chunk_keys
from raykv.protocol.trace_requests import TracedRequest, pack


def request(keys: int, at_s: float = 1.0) -> TracedRequest:
    return TracedRequest(at_s, 16, chunk_keys.named(b"d" * 16, [f"{number}" for number in range(keys)]))


def test_the_buffer_is_bounded():
    buffer = TraceBuffer()
    raw = pack([request(1 << 12)])
    for _ in range(MAX_BUFFER_KEYS >> 12):
        buffer.add(raw)
    buffer.add(raw)
    requests, left_out = buffer.drain()
    assert (len(requests), left_out) == (MAX_BUFFER_KEYS >> 12, 1)
    buffer.add(raw)
    assert (len(buffer.drain()[0]), buffer.drain()) == (1, ([], 0))


def test_requests_without_keys_use_room_too(monkeypatch):
    monkeypatch.setattr("raykv.node.trace_buffer.MAX_BUFFER_KEYS", 100)
    buffer = TraceBuffer()
    buffer.add(pack([request(0)] * 101))
    assert (len(buffer.drain()[0]), buffer.left_out) == (100, 0)
    buffer.add(pack([request(0)] * 101))
    assert buffer.left_out == 1


def test_requests_are_drained_in_parts_and_in_order(monkeypatch):
    monkeypatch.setattr("raykv.node.trace_buffer.MAX_BUFFER_KEYS", 1000)
    buffer = TraceBuffer()
    buffer.add(pack([request(size, float(place)) for place, size in enumerate([5, 1, 0, 7, 30, 2])]))
    parts = []
    while buffer:
        parts.append([len(each.keys) for each in buffer.drain(8)[0]])
    assert parts == [[5, 1, 0], [7], [30], [2]]
    buffer.add(pack([request(1000)]))
    assert len(buffer.drain(8)[0]) == 1, "all of its room is free again"


def test_damaged_requests_are_refused_and_those_before_them_count():
    buffer = TraceBuffer()
    with pytest.raises(UsageError, match="end in the middle"):
        buffer.add(pack([request(3), request(3)])[:-1])
    assert len(buffer.drain()[0]) == 1
