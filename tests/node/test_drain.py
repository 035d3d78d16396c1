"""A node is drained: its chunks move to nodes with room, and nothing is lost in silence."""

import itertools
import random
import threading
import time
from contextlib import closing

import numpy as np
import pytest

import raykv
from raykv.errors import UsageError
from raykv.node.moving import Window, runs_of
from raykv.protocol import messages
from raykv.transport.link import Link
from tests.support.clients import remote_client
from tests.support.drains import drain, drained, leave, stored_on
from tests.support.nodes import SPACE, cluster, content, get, names, put, wait_until

NBYTES = 50_000
OTHER = raykv.Namespace(model="other", salt="s")


def test_every_chunk_moves_and_is_found_after_the_node_has_left():
    with cluster(4) as running:
        with running.client(SPACE, node=3) as client:
            put(client, names(40))
            running.settle()
            progress = drained(running, 3)
        assert (progress.moved, progress.left, progress.reason) == (40, 0, "")
        assert progress.moved_nbytes == 40 * NBYTES
        leave(running, 3)
        assert get(running.client(SPACE, node=0), names(40)) == (True,) * 40
        assert [member.node_id for member in running.nodes[0].view.members] == ["node-0", "node-1", "node-2"]


def test_chains_groups_sizes_expiry_and_priority_are_the_same_afterwards(rng: random.Random):
    with cluster(2) as running:
        mine, other = running.client(SPACE, node=1), running.client(OTHER, node=1)
        chains = {}
        for number in range(6):
            keys = mine.chain([number * 1000 + token for token in range(5)])
            chains[number] = keys
            mine.put(keys, [content(f"{number}-{place}", 3000 * (number + 1)) for place in range(len(keys))])
        branch = mine.chain([0, 1, 5000, 5001, 5002])
        assert mine.put(branch, [content(f"0-{p}" if p < 2 else f"b-{p}", 3000) for p in range(5)]).existed == 2
        other.put(names(5), [content(name, 7000) for name in names(5)], chained=False, ttl_s=500.0, priority=7)
        total = running.nodes[1].store.chunks
        progress = drained(running, 1)
        assert (progress.moved, progress.left) == (total, 0)
        leave(running, 1)
        store, here = running.nodes[0].store, running.client(SPACE)
        columns = store.table.columns
        for number, keys in [*chains.items(), ("b", branch)]:
            rows = store.table.find(keys)
            assert (rows >= 0).all(), number
            assert columns.depth[rows].tolist() == list(range(len(keys)))
            assert columns.parent[rows].tolist() == [-1, *rows[:-1].tolist()]
        for number, keys in chains.items():
            into = [bytearray(3000 * (number + 1)) for _ in keys]
            assert all(here.get(keys, into).hits)
            assert into == [content(f"{number}-{place}", 3000 * (number + 1)) for place in range(len(keys))]
        there = running.client(OTHER)
        rows = store.table.find(there.keys(names(5)))
        assert store.row_hints.priorities(rows) == [7] * 5
        left_s = [store.table.seconds(tick) - time.monotonic() for tick in columns.expires[rows].tolist()]
        assert all(400.0 < each < 500.0 for each in left_s)
        assert columns.depth[rows].tolist() == [0] * 5


def test_the_most_valuable_chunks_are_moved_when_room_is_short():
    with cluster(2, arena_nbytes="2 MiB") as running:
        old, hot = names(15, "old"), names(15, "hot")
        with running.client(SPACE, node=1) as client, running.client(OTHER, node=0) as there:
            put(client, old)
            put(client, hot)
            for _ in range(3):
                assert all(get(client, hot))
            filler = names(16, "filler")
            assert put(there, filler).stored == 16
            running.settle()
            progress = drained(running, 1)
            assert progress.moved + progress.left == 30
            assert progress.left > 0
            assert "room" in progress.reason
            assert progress.left_nbytes == progress.left * NBYTES
            keys = client.keys([*hot, *old])
            moved = stored_on(running, 0, keys)
            assert sum(moved) == progress.moved
            assert moved == sorted(moved, reverse=True), "the hot ones, then the others"
            assert all(there.exists(filler)), "nothing was evicted for them"
            assert running.nodes[0].store.counters.evicted == 0


def test_chunks_that_others_hold_are_not_sent_again():
    with cluster(3) as running:
        with running.client(SPACE, node=0) as one, running.client(SPACE, node=2) as two:
            put(one, names(10))
            put(two, names(14))
            running.settle()
        progress = drained(running, 2)
        assert (progress.moved, progress.elsewhere, progress.left) == (4, 10, 0)


def test_two_nodes_that_leave_do_not_rely_on_each_other():
    with cluster(3) as running:
        for node in (1, 2):
            with running.client(SPACE, node=node) as client:
                put(client, names(20))
        running.settle()
        drained(running, 1, 2)
        leave(running, 1, 2)
        assert get(running.client(SPACE), names(20)) == (True,) * 20


def test_two_drains_do_not_overfill_a_node():
    with cluster(3, arena_nbytes="2 MiB") as running:
        for node in (1, 2):
            with running.client(SPACE, node=node) as client:
                put(client, names(30, f"from-{node}"))
        with running.client(SPACE) as client:
            mine = names(10, "mine")
            put(client, mine)
            running.settle()
            drained(running, 1, 2)
            progress = [running.nodes[node].drain.progress for node in (1, 2)]
            store = running.nodes[0].store
            assert all(each.moved + each.left == 30 and "room" in each.reason for each in progress)
            assert store.chunks == 10 + sum(each.moved for each in progress) > 20
            assert store.counters.evicted == 0
            assert all(client.exists(mine, timeout_s=0.0))


def test_a_draining_node_serves_reads_but_stores_nothing():
    with cluster(2) as running, running.client(SPACE, node=1) as client, remote_client(running, 1) as remote:
        put(client, names(5))
        running.settle()
        drained(running, 1)
        assert get(client, names(5)) == (True,) * 5
        assert put(client, ["new"]).stored == 0
        assert not running.nodes[1].store.table.find(client.keys(["new"]))[0] >= 0
        assert put(remote, ["far"]).stored == 1, "the owner of the key is another node now"
        assert stored_on(running, 0, client.keys(["far"])) == [True]
        assert running.nodes[0].view.member("node-1").weight == 0


def test_reads_never_miss_while_a_node_is_drained_and_leaves():
    with cluster(4, arena_nbytes="16 MiB") as running:
        keys = names(120)
        with running.client(SPACE, node=3) as client:
            put(client, keys)
        running.settle()
        stop, missed, reads = threading.Event(), [], [0]

        def read(node: int) -> None:
            rng = random.Random(node)
            with running.client(SPACE, node=node) as reader:
                while not stop.is_set():
                    some = rng.sample(keys, 4)
                    if not all(get(reader, some)):
                        missed.append(some)
                    reads[0] += 1

        threads = [threading.Thread(target=read, args=(node,)) for node in range(3)]
        for thread in threads:
            thread.start()
        try:
            drain(running, 3, rate=4e6)
            wait_until(lambda: running.nodes[3].drain.progress.state == "done", timeout_s=30.0)
            running.settle()
            leave(running, 3)
            time.sleep(0.3)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        print(f"{reads[0]} reads, {len(missed)} missed")
        assert reads[0] > 20
        assert len(missed) <= reads[0] / 100


def test_the_rate_is_kept():
    with cluster(2) as running, running.client(SPACE, node=1) as client:
        put(client, names(40))
        began_s = time.monotonic()
        drain(running, 1, rate=40 * NBYTES / 0.8)
        wait_until(lambda: running.nodes[1].drain.progress.state == "done")
        assert time.monotonic() - began_s >= 0.75


def test_the_last_node_keeps_its_chunks_and_says_so():
    with cluster(1) as running, running.client(SPACE) as client:
        put(client, names(5))
        drain(running, 0)
        wait_until(lambda: running.nodes[0].drain.progress.state == "done")
        progress = running.nodes[0].drain.progress
        assert (progress.moved, progress.left) == (0, 5)
        assert progress.reason
        assert get(client, names(5)) == (True,) * 5


def test_a_target_that_dies_is_replaced_by_another(monkeypatch):
    with cluster(3) as running:
        with running.client(SPACE, node=2) as client:
            put(client, names(40))
        running.settle()
        drain(running, 2, rate=40 * NBYTES / 0.5)
        wait_until(lambda: running.nodes[2].drain.progress.moved > 5)
        running.kill(1)
        wait_until(lambda: running.nodes[2].drain.progress.state == "done", timeout_s=60.0)
        progress = running.nodes[2].drain.progress
        assert progress.left == 0
        assert progress.moved + progress.elsewhere >= 40
        if "node-1" in progress.reason:  # it died during a run, so that the whole run was sent to the other node
            assert running.nodes[0].store.chunks == 40


def test_only_a_local_process_may_drain_a_node():
    with cluster(1) as running:
        node = running.nodes[0]
        with (
            closing(
                Link.connect(node.member.address, bytes.fromhex(running.secret), deadline_s=time.monotonic() + 5)
            ) as link,
            pytest.raises(UsageError, match="only a process of this host"),
        ):
            link.call(messages.Drain(1e9), deadline_s=time.monotonic() + 5.0)
        for rate in (0.0, -1.0, float("nan"), 1e-300):  # a pause of more than 292 years cannot be waited for
            with pytest.raises(UsageError, match="nbytes_per_s"):
                drain(running, 0, rate)
        assert not node.drain.started.is_set()


def test_a_drain_that_is_asked_for_twice_is_one_drain():
    with cluster(2) as running, running.client(SPACE, node=1) as client:
        put(client, names(10))
        drain(running, 1)
        assert drained(running, 1).moved == 10


def test_stopping_a_node_ends_its_drain():
    with cluster(2) as running, running.client(SPACE, node=1) as client:
        put(client, names(40))
        drain(running, 1, rate=1000.0)
        wait_until(lambda: running.nodes[1].drain.progress.moved > 0)
        began_s = time.monotonic()
        running.nodes[1].stop(unlink=True)
        assert time.monotonic() - began_s < 3.0
        assert running.nodes[1].failure is None


def test_runs_are_chains_or_roots(np_rng: np.random.Generator):
    """Each run can be stored by one Write, and all runs together hold each wanted chunk once."""
    count = 200
    parents = np.array([np_rng.integers(-1, place) if place else -1 for place in range(count)], np.int32)
    depths = np.zeros(count, np.uint32)
    for place in range(count):
        depths[place] = depths[parents[place]] + 1 if parents[place] >= 0 else 0
    rows = np.arange(count, dtype=np.int32)
    from raykv.protocol import chunk_keys
    from raykv.types import NO_HINTS, Hints

    keys = chunk_keys.named(SPACE.digest, names(count))
    sizes = np_rng.choice([100, 200], count, p=[0.9, 0.1]).astype(np.uint32)
    groups = np_rng.choice([0, 1], count, p=[0.9, 0.1]).astype(np.uint16)
    hints = [NO_HINTS if number else Hints(3.0, 1) for number in np_rng.integers(0, 10, count).tolist()]
    window = Window(keys, rows, sizes, groups, parents, keys[np.maximum(parents, 0)], depths, hints)
    wanted = np_rng.random(count) < 0.8
    runs = list(runs_of(window, wanted))
    assert sorted(place for run in runs for place in run) == np.flatnonzero(wanted).tolist()
    assert max(map(len, runs)) > 2
    for run in runs:
        assert len({(sizes[place], groups[place], hints[place]) for place in run}) == 1
        linked = all(parents[after] == before for before, after in itertools.pairwise(run))
        roots = all(parents[place] < 0 for place in run)
        assert linked or roots
