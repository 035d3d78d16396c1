"""A put of more than the node lends to one connection at once is stored in parts."""

import pytest

from raykv.client.writer import PUT_SHARE
from tests.support.nodes import SPACE, cluster, content, names

NBYTES = 5000
SLOT = 8192


@pytest.mark.parametrize("wait", [True, False])
def test_a_put_may_fill_the_whole_arena(wait):
    with cluster(1, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        keys = names(230)  # of 256 slots
        assert len(keys) * SLOT > (2 << 20) // PUT_SHARE
        result = client.put(keys, [content(key, NBYTES) for key in keys], wait=wait)
        result += client.flush()
        assert (result.stored, result.skipped) == (230, 0)
        columns, store = running.nodes[0].store.table.columns, running.nodes[0].store
        rows = store.table.find(client.keys(keys))
        assert columns.depth[rows].tolist() == list(range(230))
        assert columns.parent[rows].tolist() == [-1, *rows[:-1].tolist()], "one chain"
        into = [bytearray(NBYTES) for _ in keys]
        assert all(client.get(keys, into).hits)
        assert into == [content(key, NBYTES) for key in keys]


def test_independent_objects_stay_independent():
    with cluster(1, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        keys = names(200)
        assert client.put(keys, [content(key, NBYTES) for key in keys], chained=False).stored == 200
        columns, store = running.nodes[0].store.table.columns, running.nodes[0].store
        rows = store.table.find(client.keys(keys))
        assert not columns.depth[rows].any()
        assert (columns.parent[rows] == -1).all()


def test_several_sizes_in_parts():
    with cluster(1, arena_nbytes="2 MiB", extent_nbytes="64 KiB") as running, running.client(SPACE) as client:
        keys = names(60)
        values = [content(key, 20_000 if number % 7 else 4000) for number, key in enumerate(keys)]
        assert client.put(keys, values).stored == 60
        into = [bytearray(len(value)) for value in values]
        assert all(client.get(keys, into).hits)
        assert into == values
