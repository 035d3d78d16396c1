"""A host that often reads the first chunk of a prompt from other hosts stores a copy of it."""

import random
import time

import numpy as np

from raykv.client import root_copies
from raykv.client.root_copies import COPY_READS, COPY_TTL_S, MAX_COUNTED, WINDOW_S, RootCopies
from tests.support.nodes import NBYTES, SPACE, cluster, content, get, names, put


def test_only_frequent_reads_make_a_copy(rng: random.Random):
    """Compared with a list of all reads."""
    counted, reads, now_s = RootCopies(), {}, 0.0
    for _ in range(3000):
        now_s += rng.expovariate(0.5)
        key = bytes([rng.randrange(12)]) * 16
        recent = [at for at in reads.get(key, []) if now_s - at < WINDOW_S] + [now_s]
        copy = len(recent) >= COPY_READS
        assert counted.count(key, now_s=now_s) == copy
        reads[key] = [] if copy else recent
    for number in range(3 * MAX_COUNTED):
        counted.count(number.to_bytes(16), now_s=now_s)
    assert len(counted._reads) == MAX_COUNTED


def test_the_first_chunk_of_a_hot_prompt_is_copied_to_the_readers_host():
    keys = names(3)
    with cluster(2) as running:
        put(running.client(SPACE, node=0), keys)
        running.settle()
        reader = running.client(SPACE, node=1)
        store = running.nodes[1].store
        for _ in range(COPY_READS):
            assert not (store.table.find(reader.keys(keys)) >= 0).any()
            assert get(reader, keys) == (True,) * 3
        rows = store.table.find(reader.keys(keys))
        assert (rows >= 0).tolist() == [True, False, False]
        assert store.row_hints.priorities(rows[:1]) == [-100]
        left_s = store.table.seconds(int(store.table.columns.expires[rows[0]])) - time.monotonic()
        assert COPY_TTL_S - 5 < left_s <= COPY_TTL_S + 0.1
        into = bytearray(NBYTES)
        assert reader.get(keys[:1], [into]).nbytes_by_path == {"shm": NBYTES}
        assert into == content(keys[0])
        assert reader.flush().stored == 0, "a copy is no put of the caller"


def test_nodes_of_one_host_need_no_copy(monkeypatch):
    monkeypatch.setattr(root_copies, "COPY_READS", 1)
    with cluster(2, separate_hosts=False) as running:
        put(running.client(SPACE, node=0), names(2))
        running.settle()
        reader = running.client(SPACE, node=1)
        for _ in range(5):
            assert get(reader, names(2)) == (True, True)
        assert running.nodes[1].store.chunks == 0
        assert np.array_equal(reader.exists(names(2)), [True, True])
