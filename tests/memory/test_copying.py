"""Bytes in pieces."""

from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from raykv.memory.copying import checksum_of, copy, gather, scatter


def cut(raw: bytes | bytearray, places: list[int]) -> list[memoryview]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [memoryview(raw)[start:stop] for start, stop in pairwise(edges)]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.lists(st.integers(0, 300), max_size=5))
def test_gather_and_scatter_are_each_others_inverse(raw, from_, to):
    whole, back = bytearray(len(raw)), bytearray(len(raw))
    gather(memoryview(whole), cut(raw, from_))
    assert whole == raw
    assert scatter(memoryview(whole), cut(back, to))
    assert back == raw
    assert checksum_of(cut(raw, to)) == xxhash.xxh3_64_intdigest(raw)


@pytest.mark.parametrize("lengths", [[3], [5], [2, 1], [2, 3], []])
def test_lengths_that_differ_copy_nothing(lengths):
    into = [bytearray(length) for length in lengths]
    assert not scatter(memoryview(b"four"), [memoryview(each) for each in into])
    assert into == [bytes(length) for length in lengths]


@pytest.mark.parametrize("nbytes", [0, 1, (64 << 10) - 1, 64 << 10, 1 << 20])
def test_large_and_small_copies(nbytes, rng):
    source, target = rng.randbytes(nbytes), bytearray(nbytes)
    copy(memoryview(target), memoryview(source))
    assert target == source
