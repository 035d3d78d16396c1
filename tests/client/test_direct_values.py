"""Values that a caller writes straight into the arena, as a GPU does."""

from collections.abc import Sequence

import numpy as np
import pytest

from raykv.client.puts import Put
from raykv.errors import LostError, UsageError
from raykv.memory.copying import checksum_of
from raykv.types import DirectValues
from tests.support.nodes import SPACE, cluster, content, names, wait_until

NBYTES = 5000


class Writer:
    """Writes the contents of `keys`. `written`: the positions, in the order of the calls."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys, self.written = keys, list[int]()
        self.values = DirectValues(len(keys), NBYTES, self._write)

    def _write(self, positions: Sequence[int], views: Sequence[memoryview]) -> np.ndarray:
        self.written += positions
        checksums = []
        for position, view in zip(positions, views, strict=True):
            view[:] = content(self.keys[position], NBYTES)
            checksums.append(checksum_of([view]))
        return np.array(checksums, np.uint64)


def test_only_missing_chunks_are_written_and_a_chain_stays_a_chain():
    with cluster(1, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        keys = names(12)
        writer = Writer(keys)
        assert client.put(keys[3:5], [content(key, NBYTES) for key in keys[3:5]]).stored == 2
        result = client.put_many([Put(keys, writer.values)], wait=True)
        assert (result.stored, result.existed, result.skipped) == (10, 2, 0)
        assert writer.written == [0, 1, 2, *range(5, 12)]
        store = running.nodes[0].store
        rows = store.table.find(client.keys(keys))
        expected = [checksum_of([memoryview(content(key, NBYTES))]) for key in keys]
        assert store.table.columns.checksum[rows].tolist() == expected
        into = [bytearray(NBYTES) for _ in keys]
        assert all(client.get(keys, into).hits)
        assert into == [content(key, NBYTES) for key in keys]


def test_more_than_the_node_lends_at_once_is_written_in_parts():
    with cluster(1, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        keys = names(230)
        writer = Writer(keys)
        assert client.put_many([Put(keys, writer.values)], wait=True).stored == 230
        assert writer.written == list(range(230))
        into = [bytearray(NBYTES) for _ in keys]
        assert all(client.get(keys, into).hits)
        assert into == [content(key, NBYTES) for key in keys]


def test_chunks_for_other_nodes_are_written_to_memory_and_sent():
    with cluster(3, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        client.configure(placement="spread")
        wait_until(lambda: all(node.store.table.spread.any() for node in running.nodes))
        keys = names(30)
        for place in range(30):
            writer = Writer(keys[place : place + 1])
            assert client.put_many([Put(keys[place : place + 1], writer.values, chained=False)], wait=True).stored == 1
            assert writer.written == [0]
        held = [(node.store.table.find(client.keys(keys)) >= 0).sum() for node in running.nodes]
        assert sum(held) == 30
        assert min(held) > 0, held
        running.settle()
        into = [bytearray(NBYTES) for _ in keys]
        assert all(client.get(keys, into).hits)
        assert into == [content(key, NBYTES) for key in keys]


def test_an_error_while_writing_gives_the_slots_back():
    def fail(*_: object) -> np.ndarray:
        raise LostError("cudaMemcpyAsync: out of luck")

    with cluster(1, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        for _ in range(50):  # 400 slots in all, of 128
            with pytest.raises(LostError, match="out of luck"):
                client.put_many([Put(names(8), DirectValues(8, NBYTES, fail))], wait=True)
        keys = names(100)
        assert client.put_many([Put(keys, Writer(keys).values)], wait=True).stored == 100


def test_the_count_must_be_right():
    with cluster(1, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        with pytest.raises(UsageError, match="field 'values': 3 chunks for 2 keys"):
            client.put_many([Put(names(2), Writer(names(3)).values)])
        assert client.put_many([Put([], Writer([]).values)], wait=True).stored == 0
