"""Puts through slots lent ahead of need, waited for or posted; nodes and clients that die or hang in between."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import xxhash

import raykv
from raykv.client.slot_pool import GROW_S, MAX_POOL_NBYTES, MAX_POOL_SLOTS, POOL_IDLE_S, Outcome, QuotaGroup, SlotPool
from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.memory.reader import ShmReader
from raykv.memory.slots import slot_nbytes
from raykv.protocol import messages
from raykv.transport.base import MAX_POSTED
from raykv.types import PutResult
from tests.node.test_node_process import NBYTES, NodeProcess, content, get, kill, names, node, put, run, wait_until

__all__ = ["node"]  # the fixture

SLOT_NBYTES = slot_nbytes(NBYTES)

HOLDER = """
import sys
import raykv

client = raykv.connect(raykv.Namespace(model="m"), address=sys.argv[1])
for number in range(40):
    client.put_one(client.key(f"held-{number}"), bytes(50_000))
client.put([f"posted-{number}" for number in range(9)], [bytes(50_000)] * 9, wait=False)
print("holding", flush=True)
sys.stdin.read()
"""


def lent_nbytes(node: NodeProcess) -> int:
    return node.stats()["lent_nbytes"]


def pool_starts(client) -> list[int]:
    """Where in the arena the slots begin that a client has on loan."""
    return [start for pool in client._router.local._pools.values() for _, start, _ in pool.slots]


# -- the pool alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 1 << 20, 64 << 20])
@pytest.mark.parametrize("arena_nbytes", [1 << 20, 32 << 20, 1 << 40])
def test_a_pool_is_bounded(size, arena_nbytes):
    pool = SlotPool(size, arena_nbytes)
    for number in range(100):
        pool.ran_short(1 << number % 20)
        wanted = len(pool.slots) + pool.lacking(number * GROW_S / 2)
        assert wanted <= MAX_POOL_SLOTS
        assert wanted * size <= min(MAX_POOL_NBYTES, arena_nbytes // 16)


def test_a_pool_grows_with_use_and_is_filled_when_half_empty():
    pool = SlotPool(4096, 1 << 30)
    pool.ran_short(2)
    assert pool.lacking(0.0) == 4
    pool.slots += [(1, 10, 7), (2, 20, 9), (3, 30, 11), (4, 40, 13)]
    assert pool.lacking(0.1) == 0
    assert pool.take(1, 0.2) == [(4, 40, 13)]
    assert pool.lacking(0.2) == 0
    assert pool.take(1, 0.3) == [(3, 30, 11)]
    assert pool.lacking(0.3) == 6  # again, so soon: twice as many as before
    assert pool.lacking(9.0) == 6  # not so soon
    pool.coming = 6
    assert pool.take(5, 9.1) == [(1, 10, 7), (2, 20, 9)]
    assert pool.lacking(9.1) == 0  # they are on their way


def test_an_outcome_is_told_once():
    outcome = Outcome()
    outcome.note(stored=3, existed=1)
    outcome.note(skipped=2, reason="gone")
    outcome.note(skipped=1, reason="later")
    assert outcome.take() == PutResult(3, 1, 3, "gone")
    assert outcome.take() == PutResult(0, 0, 0)


# -- many that arrive together ---------------------------------------------------------------------------------------


class Direct:
    """A node and one connection to it, without either's thread."""

    def __init__(self, shm_dir: Path, joined: bool) -> None:
        shm_dir.mkdir()
        self.cluster = raykv.embedded(1, arena_nbytes="256 MiB", shm_dir=str(shm_dir))
        self.node, self.joined = self.cluster.nodes[0], joined
        self.session = self.node.session(local=True)
        self.group = QuotaGroup.of(raykv.Namespace(model="m"))
        self.ask(messages.OpenNamespace(self.group.text))
        (attached,) = self.ask(messages.Attach())
        self.reader = ShmReader(attached.table, attached.arena, writable=True)

    def ask(self, *requests: messages.Message) -> list[messages.Answer]:
        if self.joined and len(requests) > 1:
            return list(self.node.answer_joined(requests, self.session))
        return [self.node.answer(request, self.session).answer for request in requests]

    def lend(self, count: int, nbytes: int) -> list[tuple[int, int, int]]:
        (lent,) = self.ask(messages.Lend(self.group.digest, nbytes, count))
        rows = np.frombuffer(lent.rows, "<i4").tolist()
        generation = self.reader.table.cells.generation
        starts = np.frombuffer(lent.offsets, "<u8").tolist()
        return [(row, start, generation[row]) for row, start in zip(rows, starts, strict=True)]

    def state(self) -> tuple:
        """But for which rows and slots it is."""
        columns, store = self.reader.table.columns, self.node.store
        with self.node._lock:
            store.take_in(now_s=time.monotonic())  # what was published, and its store refused
        rows = store.table.ready_rows()
        told = [getattr(columns, field)[rows].tolist() for field in ("key_hi", "key_lo", "nbytes", "parent", "depth")]
        return sorted(zip(*told, strict=True)), store.counters.committed, store.room.lent_nbytes

    def close(self) -> None:
        self.session.close()
        self.reader.close()
        self.cluster.close()


WRONG = [
    *(("rows", raw) for raw in (b"", b"\1", bytes(8), (1 << 20).to_bytes(4, "little"))),
    *(("nbytes", number) for number in (0, 70_000, 4 << 20)),
    *(("group", raw) for raw in (b"", bytes(16))),
    *(("ahead", number) for number in (-1, 3, 1 << 30)),
    *(("keys", raw) for raw in (b"", bytes(15), bytes(32))),
    *(("checksums", raw) for raw in (b"", bytes(16))),
    *(("positions", raw) for raw in (bytes(4), b"\1\0\0\0")),
    *(("ttl_s", 50.0), ("ttl_s", -1.0), ("priority", 2), ("chained", True), ("depth", -5)),
]


@pytest.mark.skipif(not native.available, reason="without the compiled loops nothing is published")
def test_stores_that_arrive_together_do_what_they_would_do_one_after_another(rng, shm_dir):
    both = alone, joined = Direct(shm_dir / "a", False), Direct(shm_dir / "b", True)
    try:
        for turn in range(60):
            count, nbytes = rng.randint(2, 12), rng.choice([300, 5000, 20_000])
            slots = [each.lend(count, nbytes) for each in both]
            some, wrong = rng.random() < 0.5, rng.random() < 0.3
            stores: list[list[messages.Store]] = [[], []]
            for number in range(count):
                key = xxhash.xxh3_128_digest(b"%d %d" % (turn, number))
                if some and rng.random() < 0.2:
                    key = xxhash.xxh3_128_digest(b"%d %d" % (rng.randrange(turn + 1), rng.randrange(12)))
                value = [memoryview(key * (nbytes // 16 + 1))[:nbytes]]
                published = rng.random() < (0.8 if some else 0.98)
                field, bad = rng.choice(WRONG) if wrong and rng.random() < 0.3 else ("", None)
                for each, lent, requests in zip(both, slots, stores, strict=True):
                    row, start, generation = lent[number]
                    _, checksum = each.reader.store_one(row, generation if published else 2, start, key, value, nbytes)
                    request = messages.Store(
                        each.group.digest, key, nbytes, row.to_bytes(4, "little"), checksum, chained=False
                    )
                    if field:
                        setattr(request, field, bad)
                    requests.append(request)
            if some and rng.random() < 0.3:
                again = rng.randrange(count)
                for requests in stores:
                    requests.append(requests[again])
            told = [each.ask(*requests) for each, requests in zip(both, stores, strict=True)]
            for one, other in zip(*told, strict=True):
                if isinstance(one, messages.Stored):
                    one, other = [(each.unused, len(each.rows), len(each.offsets)) for each in (one, other)]
                assert one == other
            assert alone.state() == joined.state()
            assert len(alone.session.lent) == len(joined.session.lent)
    finally:
        alone.close()
        joined.close()


# -- waited for -------------------------------------------------------------------------------------------------------


def test_in_steady_state_a_put_is_one_call(node):
    with node.client() as client:
        for number in range(60):
            assert client.put_one(client.key(f"chunk-{number}"), content(f"chunk-{number}"))
            if number % 10 == 9:  # a burst that empties the pool would have to ask for more
                client.flush()
        requests = node.stats()["requests"]
        assert requests["Store"] == 60
        assert requests["Lend"] <= 3
        assert all(get(client, names(60)))
        assert client.put_one(client.key("chunk-7"), b"other bytes")
        assert put(client, names(62)) == PutResult(2, 60, 0)
        client.flush()
        assert node.stats()["requests"]["Store"] == 61
        assert put(client, names(62)).existed == 62
        assert node.stats()["requests"]["Store"] == 61  # what is there costs no call
        assert 0 < lent_nbytes(node) <= (32 << 20) // 16


def test_a_client_that_goes_gives_its_slots_back(node):
    with node.client() as client:
        assert put(client, names(100)).stored == 100
        assert lent_nbytes(node) > 0
    wait_until(lambda: lent_nbytes(node) == 0)
    with node.client() as client:
        assert client.put(names(15, "big"), [bytes(1 << 20)] * 15).stored == 15  # none of them rests
    assert node.stats()["aborted"] == 0


@pytest.mark.slow
def test_slots_that_nobody_uses_go_back(node, monkeypatch):
    with node.client() as client:
        put(client, names(40))
        assert lent_nbytes(node) > 0
        before = time.monotonic
        monkeypatch.setattr("raykv.client.local_connection.time.monotonic", lambda: before() + POOL_IDLE_S)
        client.put(["of another size"], [bytes(100)])
        sizes = {size for (_, size), pool in client._router.local._pools.items() if pool.slots}
        assert sizes == {4096}
        monkeypatch.undo()
        assert lent_nbytes(node) <= 4096 * MAX_POOL_SLOTS


@pytest.mark.slow
def test_a_full_arena_takes_what_fits_and_says_so(node):
    with node.client() as client, node.client() as other:
        room = other.reserve(names(28, "held"), 1 << 20)
        assert len(room.views) == 28
        result = client.put(names(6), [bytes(1 << 20)] * 6)
        assert (result.stored, result.skipped, result.reason) == (4, 2, "full")
        assert not client.put_one(client.key("one"), bytes(1 << 19)) or node.stats()["evicted"]
        room.abort()
        assert client.put(names(6), [bytes(1 << 20)] * 6).skipped == 0


@pytest.mark.slow
def test_writers_of_the_same_keys_store_each_once(node):
    """Whoever comes second finds it there, before or after it has copied; nobody sees a wrong byte."""
    clients = [node.client() for _ in range(3)]
    told: list[PutResult] = []

    def write(client, wait: bool) -> None:
        for first in range(0, 240, 8):
            some = names(240)[first : first + 8]
            told.append(client.put(some, [content(name) for name in some], wait=wait))
        told.append(client.flush())

    threads = [
        threading.Thread(target=write, args=(client, wait))
        for client, wait in zip(clients, (True, True, False), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.stored for each in told) == 240 == node.stats()["committed"]
    assert sum(each.stored + each.existed for each in told) == 3 * 240
    assert all(get(clients[0], names(240)))
    for client in clients:
        client.close()


@pytest.mark.slow
def test_threads_of_one_client_share_its_connection(node):
    with node.client() as client:

        def write(writer: int) -> None:
            for number in range(40):
                name = f"w{writer}-{number}"
                if number % 2:
                    assert client.put_one(client.key(name), content(name), wait=writer % 2 == 0)
                else:
                    assert client.put([name], [content(name)], wait=writer % 2 == 1).skipped == 0

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.flush().stored == 80
        assert all(get(client, [f"w{writer}-{number}" for writer in range(4) for number in range(40)]))


# -- posted -----------------------------------------------------------------------------------------------------------


def test_a_client_reads_what_it_posted(node):
    with node.client() as client, node.client() as other:
        for number in range(150):
            name = f"chunk-{number}"
            if number % 3:
                assert client.put_one(client.key(name), content(name), wait=False)
            else:
                result = client.put([name, f"{name}-more"], [content(name), content(f"{name}-more")], wait=False)
                assert (result.stored, result.posted) == (0, 2)
            if number % 5 == 0:
                assert get(client, [name]) == (True,)
            elif number % 5 == 1:
                assert client.match([name]).count == 1
            elif number % 5 == 2:
                into = bytearray(NBYTES)
                assert client.get_one(client.key(name), into)
                assert into == content(name)
        done = client.flush()
        assert (done.stored, done.existed, done.skipped, done.posted) == (200, 0, 0, 0)
        assert client.flush() == PutResult(0, 0, 0)
        assert all(get(other, names(150)))


def test_what_others_stored_first_is_told_by_flush(node):
    with node.client() as client, node.client() as other:
        put(client, ["first"])  # it has slots now
        room = other.reserve(names(3), NBYTES)
        for name, view in zip(names(3), room.views, strict=True):
            view[:] = content(name)
        # They are being written: this put leaves them out without a call.
        assert put(client, names(3)) == PutResult(0, 3, 0)
        room.abort()
        assert client.put(names(3), [content(name) for name in names(3)], wait=False).posted == 3
        assert client.flush() == PutResult(3, 0, 0)


@pytest.mark.slow
def test_a_node_that_hangs_costs_no_more_than_the_deadline(node):
    with node.client() as client:
        put(client, names(30))
        client.flush()
        node.process.send_signal(signal.SIGSTOP)
        posted = skipped = 0
        reasons = set()
        for number in range(MAX_POSTED + 10):
            start_s = time.monotonic()
            result = client.put([f"late-{number}"], [content(f"late-{number}")], wait=False, timeout_s=0.2)
            assert time.monotonic() - start_s < 1.0
            posted, skipped = posted + result.posted, skipped + result.skipped
            reasons.add(result.reason)
        assert posted + skipped == MAX_POSTED + 10
        assert posted > 0
        assert skipped > 0
        assert all(get(client, names(30), timeout_s=0.2))
        start_s = time.monotonic()
        done = client.flush(timeout_s=0.2)
        assert time.monotonic() - start_s < 1.0
        assert done.stored + done.existed + done.skipped + done.posted == posted
        node.process.send_signal(signal.SIGCONT)
        wait_until(lambda: put(client, ["again"]).skipped == 0)
        late = [f"late-{number}" for number in range(MAX_POSTED + 10)]
        assert sum(get(client, late)) <= posted


@pytest.mark.slow
def test_posted_puts_that_got_lost_are_told_and_nothing_raises(node):
    with node.client() as client:
        put(client, names(30))
        posted = 0
        for number in range(20):
            posted += client.put([f"late-{number}"], [content(f"late-{number}")], wait=False).posted
        node.kill()
        for number in range(20, 40):
            result = client.put([f"late-{number}"], [content(f"late-{number}")], wait=False, timeout_s=0.5)
            posted += result.posted
            assert result.posted or result.reason
            assert client.put_one(client.key("x"), b"x", wait=False, timeout_s=0.5) in (True, False)
        posted_ones = client.flush(timeout_s=1.0)
        assert posted_ones.posted == 0
        assert posted_ones.stored + posted_ones.skipped >= posted
        assert posted_ones.skipped > 0 or posted_ones.stored >= posted
        node.start()
        wait_until(lambda: put(client, ["again"]).skipped == 0)
        get(client, [f"late-{number}" for number in range(40)])


# -- late calls -------------------------------------------------------------------------------------------------------


def slots_of(client) -> int:
    client.flush()
    return len(pool_starts(client))


@pytest.mark.skipif(not native.available, reason="without the compiled loops nothing is published")
def test_what_took_too_long_to_write_is_told_all_the_same(node, monkeypatch):
    """Else its slots stay on loan, and cannot be evicted, for as long as the connection lasts."""
    with node.client() as client:
        put(client, names(4))
        threads = client._router.copy_threads
        fill = threads.fill

        def slow_fill(*arguments):
            time.sleep(0.3)
            return fill(*arguments)

        monkeypatch.setattr(threads, "fill", slow_fill)
        late = names(12)[4:]
        client.put(late, [content(name) for name in late], timeout_s=0.2)
        monkeypatch.undo()
        assert all(get(client, late))
        wait_until(lambda: lent_nbytes(node) == slots_of(client) * SLOT_NBYTES)


@pytest.mark.skipif(not native.available, reason="without the compiled loops nothing is published")
@pytest.mark.parametrize("wait", [True, False])
def test_what_took_too_long_to_write_and_was_published_in_part_is_told_all_the_same(node, monkeypatch, wait):
    with node.client() as client, node.client() as other:
        put(client, names(4))
        threads, late = client._router.copy_threads, names(12)[4:]
        fill = threads.fill

        def slow_fill(*arguments):
            put(other, late[3:4])  # somebody else's by now
            time.sleep(1.2)
            return fill(*arguments)

        monkeypatch.setattr(threads, "fill", slow_fill)
        client.put(late, [content(name) for name in late], timeout_s=1.0, wait=wait)
        monkeypatch.undo()
        client.flush()
        other.flush()
        assert all(get(client, late))
        wait_until(lambda: lent_nbytes(node) == (slots_of(client) + slots_of(other)) * SLOT_NBYTES)


def test_slots_of_an_idle_pool_go_back_also_when_the_call_came_late(node, monkeypatch):
    with node.client() as client:
        put(client, names(8))
        put(client, names(16)[8:])
        client.flush()
        assert slots_of(client)
        before = time.monotonic
        monkeypatch.setattr("raykv.client.local_connection.time.monotonic", lambda: before() + POOL_IDLE_S + 1.0)
        client.put(["other"], [bytes(100)], timeout_s=0.0)
        monkeypatch.undo()
        client.flush()
        held = sum(len(pool.slots) * slot_nbytes(nbytes) for (_, nbytes), pool in client._router.local._pools.items())
        assert lent_nbytes(node) == held


def test_an_idle_pool_does_not_cost_the_put_that_finds_the_node_restarted(node, monkeypatch):
    with node.client() as client:
        put(client, names(8))
        client.flush()
        node.kill()
        node.start()
        before = time.monotonic
        monkeypatch.setattr("raykv.client.local_connection.time.monotonic", lambda: before() + POOL_IDLE_S + 1.0)
        done = client.put(["after"], [content("after")], timeout_s=20.0)
        assert (done.stored, done.reason) == (1, "")


def test_chunks_of_several_sizes_have_one_deadline(node, monkeypatch):
    with node.client() as client:
        deadlines, put_equal = [], client._put_equal

        def noting(*arguments, deadline_s, **options):
            deadlines.append(deadline_s)
            time.sleep(0.02)
            return put_equal(*arguments, deadline_s=deadline_s, **options)

        monkeypatch.setattr(client, "_put_equal", noting)
        assert client.put(names(3), [bytes(100), bytes(200), bytes(300)]).stored == 3
        assert len(deadlines) == 3
        assert len(set(deadlines)) == 1


def test_a_flush_tells_of_posted_chunks_alone(node):
    with node.client() as client:
        put(client, names(4))
        local = client._router.local
        local._take_in_arrived = lambda deadline_s: None  # no answer has come
        assert client.put(["b", "c"], [content("b"), content("c")]).stored == 2
        waited = bool(local._posted)
        assert client.flush(timeout_s=0.1).posted == 0
        del local._take_in_arrived
        assert waited or not native.available


INTERRUPTED = """
import os, signal, sys, threading, time
import raykv
from raykv.memory import native

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
embedded = raykv.embedded(1, arena_nbytes="64 MiB")
client, reader = embedded.client(raykv.Namespace(model="m")), embedded.client(raykv.Namespace(model="m"))
put = lambda keys, byte: client.put(keys, [byte * 4096] * len(keys), chained=False)
put(["a", "b"], b"0")
client.flush()
local, lock = client._router.local, embedded.nodes[0]._lock
if sys.argv[1] == "told":  # a rival, or a full window: the node is asked, and waited for
    local.reader.publish = lambda *arguments: False
lock.acquire()
threading.Timer(0.6, lock.release).start()
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    put([f"k{number}" for number in range(100)], b"A")
    lock.acquire()  # it needed nobody
    lock.release()
except KeyboardInterrupt:
    print("interrupted")
put([f"j{number}" for number in range(100)], b"B")
assert client.exists(["j0", "nope"]).tolist() == [True, False]
time.sleep(0.7)
into = [bytearray(4096) for _ in range(100)]
for hit, chunk in zip(reader.get([f"k{number}" for number in range(100)], into).hits, into):
    assert not hit or chunk == b"A" * 4096
client.close()
embedded.close()
"""


@pytest.mark.parametrize("how", ["told", "lent"])
def test_a_put_that_is_interrupted_spoils_neither_bytes_nor_the_client(how):
    """Control-C in a notebook, while the node is busy."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, how], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout


@pytest.mark.skipif(not native.available, reason="without the compiled loops nothing is published")
def test_slots_that_come_for_a_pool_that_is_idle_by_then_are_not_lost(node, monkeypatch):
    with node.client() as client:
        local, number = client._router.local, 0
        while not any(each.ahead for each in local._posted):  # slots are on their way
            put(client, [f"idle-{number}"])
            number += 1
        before = time.monotonic
        monkeypatch.setattr("raykv.client.local_connection.time.monotonic", lambda: before() + POOL_IDLE_S)
        client.put(["other"], [bytes(100)])
        monkeypatch.undo()
        client.flush()
        held = sum(len(pool.slots) * slot_nbytes(nbytes) for (_, nbytes), pool in local._pools.items())
        assert lent_nbytes(node) == held


def test_a_poll_takes_in_an_answer_of_which_a_part_is_there(node, monkeypatch):
    with node.client() as client:
        put(client, names(4))
        client.flush()
        link = client._router.local._link
        collect = link.collect

        def collect_in_parts(*arguments, deadline_s):
            if time.monotonic() >= deadline_s:
                raise PeerUnavailable("the deadline has passed")
            return collect(*arguments, deadline_s=deadline_s)

        late = names(9)[4:]
        client.put(late, [content(name) for name in late], wait=False)
        wait_until(link.ready)
        monkeypatch.setattr(link, "collect", collect_in_parts)
        assert client.flush(timeout_s=0.0).stored == 5
        assert client._router.local._link is link


def test_who_waits_for_another_threads_call_waits_no_longer_than_its_deadline(node):
    with node.client() as client:
        local = client._router.local
        with local._lock:
            began_s = time.monotonic()
            with pytest.raises(PeerUnavailable, match="busy"):
                local.call(messages.GetView(), deadline_s=began_s + 0.2)
        assert 0.15 < time.monotonic() - began_s < 5.0
        local.call(messages.GetView(), deadline_s=time.monotonic() + 5.0)


# -- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_slots_of_a_killed_client_come_back_after_a_rest(node):
    holder = run(HOLDER, node.local_address)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    assert lent_nbytes(node) > 0
    kill(holder)
    wait_until(lambda: lent_nbytes(node) == 0)
    stats = node.stats()
    assert stats["committed"] == 49
    assert stats["used_nbytes"] == 49 * 53_248
    with node.client() as client:
        assert put(client, names(40)).stored == 40
        assert all(get(client, names(40)))


@pytest.mark.slow
def test_slots_lent_by_a_node_that_died_are_not_written_to_later(node):
    """They rest for a while after its death. A client that was idle longer must not trust them."""
    with node.client() as idle, node.client() as busy:
        put(idle, names(40))
        idle.flush()
        old = pool_starts(idle)
        assert old
        node.kill()
        node.start()
        view = idle._router.local.reader.arena.view
        before = {start: bytes(view[start : start + NBYTES]) for start in old}
        idle._router.local._trusted_until_s = 0.0  # so much time has passed
        idle._router.local._retry_at_s = 0.0
        assert put(idle, ["new"]).skipped == 0
        assert {start: bytes(view[start : start + NBYTES]) for start in old} == before
        assert put(busy, names(60)).skipped == 0
        assert all(get(busy, [*names(60), "new"]))


@pytest.mark.slow
def test_a_slot_whose_node_just_died_is_given_to_nobody_else(node):
    with node.client() as client, node.client() as other:
        put(client, names(40))
        client.flush()
        old = set(pool_starts(client))
        assert old
        node.kill()
        node.start()
        compiled = native.available
        assert put(client, ["late"]) == (PutResult(1, 0, 0) if compiled else ANY)  # to a slot of old, which rests
        assert all(get(client, ["late"])) is compiled
        big = names(20, "big")
        assert other.put(big, [bytes([n]) * (1 << 20) for n in range(20)]).stored == 20
        assert all(get(other, ["late"])) is compiled
        columns = other._router.local.reader.table.columns
        ready = (columns.generation & 1 == 0) & (columns.generation > 0) & (columns.nbytes == 1 << 20)
        assert not old & set((columns.page[ready].astype(np.int64) * 4096).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_no_wrong_byte_however_often_the_node_dies(node, wait):
    stopping = threading.Event()
    written: list[str] = []

    def write(client, writer: int) -> None:
        number = 0
        while not stopping.is_set():
            run_of = [f"w{writer}-{number}-{place}" for place in range(1 + number % 7)]
            client.put(run_of, [content(name) for name in run_of], wait=wait, timeout_s=1.0)
            written.extend(run_of)
            number += 1

    clients = [node.client() for _ in range(3)]
    threads = [threading.Thread(target=write, args=(client, n)) for n, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.4)
        node.kill()
        node.start()
    time.sleep(0.3)
    stopping.set()
    for thread in threads:
        thread.join()
    assert sum(get(clients[0], written)) > 0  # `get` compares every byte
    for client in clients:
        client.flush(timeout_s=1.0)
        client.close()


@pytest.mark.slow
@pytest.mark.skipif(not native.available, reason="without the compiled loops nobody publishes")
def test_what_was_told_to_be_stored_is_there_however_often_the_node_dies(node, rng):
    """Puts that return while the node is dead, or dies just then, too."""
    stopping = threading.Event()
    stored: list[str] = []

    def write(client, writer: int) -> None:
        number = 0
        while not stopping.is_set() and number < 100:
            some = [f"w{writer}-{number}-{place}" for place in range(1 + number % 4)]
            result = client.put(some, [content(name) for name in some], timeout_s=0.5)
            if result.stored == len(some):
                stored.extend(some)
            if number % 3 == 0 and client.put_one(
                client.key(f"one-{writer}-{number}"), content(f"one-{writer}-{number}")
            ):
                stored.append(f"one-{writer}-{number}")
            number += 1
            time.sleep(0.005)

    clients = [node.client() for _ in range(3)]
    threads = [threading.Thread(target=write, args=(client, n)) for n, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(rng.random() * 0.2)
        node.kill()
        time.sleep(rng.random() * 0.1)
        node.start()
    time.sleep(0.5)
    stopping.set()
    for thread in threads:
        thread.join()
    print(f"{len(stored)} chunks were told to be stored")
    assert len(stored) > 50
    assert node.stats()["evicted"] == 0
    with node.client() as fresh:
        assert [name for name, hit in zip(stored, get(fresh, stored), strict=True) if not hit] == []
    with node.client(local=False) as remote:
        wait_until(lambda: all(get(remote, stored)))
    for client in clients:
        client.close()


@pytest.mark.slow
def test_processes_that_put_the_same_keys_store_each_once(node):
    program = """
import sys
import raykv

client = raykv.connect(raykv.Namespace(model="m"), address=sys.argv[1])
names = [f"same-{number}" for number in range(300)]
print("ready", flush=True)
sys.stdin.readline()
done = [client.put(names[first : first + 5], [bytes(9000)] * 5) for first in range(0, 300, 5)]
client.flush()
print(sum(each.stored for each in done), sum(each.existed for each in done), flush=True)
client.close()
"""
    writers = [run(program, node.local_address) for _ in range(3)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    told = [writer.communicate(timeout=60)[0].split() for writer in writers]
    print(told)
    assert sum(int(stored) for stored, _ in told) == 300 == node.stats()["committed"]
    assert all(int(stored) + int(existed) == 300 for stored, existed in told)


def policy_of(task: int) -> int | None:
    try:
        return os.sched_getscheduler(task)
    except ProcessLookupError:
        return None  # it has just ended


@pytest.mark.skipif(os.sched_getscheduler(0) != os.SCHED_OTHER, reason="somebody has chosen how these tests run")
def test_a_nodes_threads_do_not_interrupt_this_hosts_readers_and_writers(node):
    """Only those that serve other hosts wake as everybody does: somebody waits for them."""
    with node.client() as client, node.client(local=False) as remote:
        put(client, names(2))
        assert remote.stats()
        tasks = [int(task.name) for task in Path(f"/proc/{node.process.pid}/task").iterdir()]
        policies = [policy_of(task) for task in tasks if task != node.process.pid]
        assert policies.count(os.SCHED_BATCH) >= 4  # pulse, announcer, forerunner, and who serves `client`
        assert policies.count(os.SCHED_OTHER) >= 1
        assert os.sched_getscheduler(node.process.pid) == os.SCHED_OTHER
