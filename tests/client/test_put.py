"""Puts into slots that the node lent in advance, with and without waiting. Nodes and clients die or hang meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.client.local_connection import LocalConnection
from raykv.client.pipeline import NO_ANSWER
from raykv.client.slot_pool import (
    MAX_POOL_NBYTES,
    MAX_POOL_SHARE,
    MAX_POOL_SLOTS,
    POOL_IDLE_S,
    TRUST_S,
    SlotPool,
)
from raykv.errors import PeerUnavailable
from raykv.memory.slots import slot_nbytes
from raykv.protocol import messages
from raykv.transport.base import MAX_POSTED, Reply
from raykv.types import PutResult
from tests.support.nodes import (
    NBYTES,
    SPACE,
    NodeProcess,
    cluster,
    content,
    get,
    kill,
    names,
    node_process,
    put,
    run,
    wait_until,
)

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


@pytest.fixture
def node(shm_dir):
    with node_process(shm_dir) as made:
        yield made


def lent_nbytes(node: NodeProcess) -> int:
    return node.stats()["lent_nbytes"]


def starts_at_hand(client) -> list[int]:
    """Arena offsets of the slots in a client's pools."""
    client.flush()
    return [start for pool in client.router.writer.supply._pools.values() for _, start in pool.slots]


def at_hand_nbytes(client) -> int:
    return len(starts_at_hand(client)) * SLOT_NBYTES


def stop(node: NodeProcess) -> None:
    node.process.send_signal(signal.SIGSTOP)
    os.waitpid(node.process.pid, os.WUNTRACED)  # returns when the process has stopped


def resume(node: NodeProcess) -> None:
    node.process.send_signal(signal.SIGCONT)


# -- the slot pool without a node -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 1 << 20, 64 << 20])
@pytest.mark.parametrize("arena_nbytes", [1 << 20, 32 << 20, 1 << 40])
def test_a_pool_is_bounded(size, arena_nbytes):
    pool = SlotPool(size, arena_nbytes)
    for number in range(100):
        pool.grow(1 << number % 20)
        wanted = len(pool.slots) + pool.lacking()
        assert wanted <= MAX_POOL_SLOTS
        assert wanted * size <= min(MAX_POOL_NBYTES, arena_nbytes // 16)


def test_a_pool_grows_with_use_and_is_filled_when_half_empty():
    pool = SlotPool(4096, 1 << 30)
    pool.grow(2)
    pool.slots += [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert pool.lacking() == 0
    assert pool.pop(1, 0.2) == [(4, 40)]
    assert pool.lacking() == 0
    assert pool.pop(1, 0.3) == [(3, 30)]
    assert pool.lacking() == 6  # the pool is half empty, so the target is doubled from 4 to 8
    pool.coming = 6
    assert pool.pop(5, 0.4) == [(1, 10), (2, 20)]
    assert pool.lacking() == 0  # the 6 slots that were requested are more than half of the target, 8
    pool.coming = 0
    assert pool.lacking() == 16
    assert pool.pop_surplus(1.0) == []
    assert pool.lacking() == 0  # `pop_surplus` has set the target of the idle pool to 0


# -- puts that wait for their commit ----------------------------------------------------------------------------------


def test_in_steady_state_a_put_is_one_call(node):
    with node.client() as client:
        for number in range(60):
            assert client.put_one(client.key(f"chunk-{number}"), content(f"chunk-{number}"))
            if number % 10 == 9:  # wait for new slots, because a put sends a `Lend` if it finds the pool empty
                client.flush()
        requests = node.stats()["requests"]
        assert requests["Commit"] == 60
        assert requests["Lend"] <= 3
        assert all(get(client, names(60)))
        assert client.put_one(client.key("chunk-7"), b"other bytes")
        assert put(client, names(62)) == PutResult(2, 60, 0)
        client.flush()
        assert node.stats()["requests"]["Commit"] == 61
        assert put(client, names(62)).existed == 62
        assert node.stats()["requests"]["Commit"] == 61, "stored chunks cost no call"
        assert 0 < lent_nbytes(node) <= (32 << 20) // 16


def test_a_client_that_goes_gives_its_slots_back(node):
    with node.client() as client:
        assert put(client, names(100)).stored == 100
        assert lent_nbytes(node) > 0
    wait_until(lambda: lent_nbytes(node) == 0)
    with node.client() as client:
        assert client.put(names(15, "big"), [bytes(1 << 20)] * 15).stored == 15  # larger chunks fit again


def test_slots_that_no_put_uses_go_back(node, monkeypatch):
    with node.client() as client:
        put(client, names(40))
        assert lent_nbytes(node) > 0
        before = time.monotonic
        monkeypatch.setattr("raykv.client.slot_supply.time.monotonic", lambda: before() + POOL_IDLE_S + 1.0)
        client.put(["of another size"], [bytes(100)])
        monkeypatch.undo()
        assert lent_nbytes(node) <= 4096 * MAX_POOL_SLOTS


@pytest.mark.slow
def test_a_full_arena_takes_what_fits_and_says_so(node):
    with node.client() as client, node.client() as one, node.client() as two:  # each gets at most half of the arena
        rooms = [one.reserve(names(16, "held"), 1 << 20), two.reserve(names(12, "more"), 1 << 20)]
        assert [len(room.views) for room in rooms] == [16, 12]
        result = client.put(names(6), [bytes(1 << 20)] * 6)
        assert (result.stored, result.skipped, result.reason) == (4, 2, "full")
        assert not client.put_one(client.key("one"), bytes(1 << 19)) or node.stats()["evicted"]
        rooms[0].abort()
        assert client.put(names(6), [bytes(1 << 20)] * 6).skipped == 0


@pytest.mark.slow
def test_writers_of_the_same_keys_store_each_once(node):
    """Three clients write the same chunks. A client may copy a chunk before it learns that another has stored it."""
    clients = [node.client() for _ in range(3)]
    results: list[PutResult] = []

    def write(client, wait: bool) -> None:
        for first in range(0, 240, 8):
            some = names(240)[first : first + 8]
            results.append(client.put(some, [content(name) for name in some], wait=wait))
        results.append(client.flush())

    threads = [
        threading.Thread(target=write, args=(client, wait))
        for client, wait in zip(clients, (True, True, False), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.stored for each in results) == 240 == node.stats()["committed"]
    assert sum(each.stored + each.existed for each in results) == 3 * 240
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


# -- puts that do not wait --------------------------------------------------------------------------------------------


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


def test_flush_counts_chunks_that_another_writer_stored_first(node):
    with node.client() as client, node.client() as other:
        put(client, names(4, "first"))  # now the client has slots
        stop(node)
        assert client.put(names(3), [content(name) for name in names(3)], wait=False).posted == 3
        thread = threading.Thread(target=put, args=(other, names(4)))
        thread.start()
        resume(node)
        thread.join()
        done = client.flush()
        assert (done.stored + done.existed, done.skipped, done.posted) == (3, 0, 0)
        assert put(client, names(4)) == PutResult(0, 4, 0)
        assert all(get(other, names(4)))
        assert node.stats()["committed"] == 8


def test_many_puts_are_one_message(node):
    with node.client() as client:
        keys = client.keys(names(9))
        puts = [
            raykv.Put(keys[first : first + 3], [content(name) for name in names(9)[first : first + 3]], depth=first)
            for first in (0, 3, 6)
        ]
        puts.append(raykv.Put(["small"], [b"x"], chained=False, priority=5))
        assert client.put_many(puts, wait=True) == PutResult(10, 0, 0)
        assert node.stats()["requests"]["Commit"] == 1
        assert all(get(client, names(9)))
        assert client.put_many(puts).existed == 10
        assert client.put_many([]) == PutResult(0, 0, 0)


def test_prepared_slots_spare_the_wait(node):
    with node.client() as client:
        client.prepare(NBYTES, 20)
        assert client.router.writer.pipeline.wait_all(time.monotonic() + 5.0)
        assert len(starts_at_hand(client)) >= 20
        stop(node)
        began_s = time.monotonic()
        assert client.put(names(20), [content(name) for name in names(20)], wait=False, timeout_s=0.004).posted == 20
        print(f"{1e3 * (time.monotonic() - began_s):.2f} ms")
        resume(node)
        assert client.flush() == PutResult(20, 0, 0)
        assert node.stats()["requests"]["Lend"] == 1


# -- a node that is stopped -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stopped_s", [0.3, TRUST_S + 0.5])
def test_a_stopped_node_costs_its_deadline_and_no_lease(node, stopped_s: float):
    """Each put returns soon after its deadline of 4 ms. The connection does not break, so no lease is lost."""
    with node.client() as client, node.client() as reader:
        put(client, names(30))
        client.flush()
        assert starts_at_hand(client)
        life = client.router.writer.pipeline.life
        stop(node)
        times, posted, skipped, reasons = [], 0, 0, set()
        late = [f"late-{number}" for number in range(10 * MAX_POSTED)]
        until_s = time.monotonic() + stopped_s
        for name in late:
            value = [content(name)]
            began_s = time.monotonic()
            result = client.put([name], value, wait=False, timeout_s=0.004)
            times.append(time.monotonic() - began_s)
            posted, skipped = posted + result.posted, skipped + result.skipped
            reasons.add(result.reason)
            assert result.posted + result.skipped == 1
            if time.monotonic() >= until_s:
                break
        asked = len(times)
        while time.monotonic() < until_s:
            time.sleep(0.01)
        began_s = time.monotonic()
        assert client.put(["trust is gone"], [bytes(NBYTES)], wait=False, timeout_s=0.004).posted <= 1
        times.append(time.monotonic() - began_s)
        print(f"{asked} puts, {posted} posted; ms: {[round(1e3 * each, 2) for each in sorted(times)[-9:]]}; {reasons}")
        times.sort()
        assert times[len(times) // 2] < 0.0055
        assert times[-3] < 0.05, "a busy machine may stop this process for a moment"
        assert posted > 0
        assert skipped > 0
        assert all(get(client, names(30), timeout_s=0.2))
        assert client.flush(timeout_s=0.01).posted >= posted
        resume(node)
        assert client.flush().stored >= posted
        assert put(client, ["again"]).stored == 1
        assert sum(get(reader, late[:asked])) == posted
        assert client.router.writer.pipeline.life == life, "the same connection"


def test_a_connection_that_takes_longer_than_a_put_serves_later_puts(node, monkeypatch):
    """A busy host connects in 5 to 30 ms, and an engine waits 3 ms, of which it may have nothing left."""
    attempts = []
    with node.client() as client:
        pipeline = client.router.writer.pipeline
        connect = pipeline._open_link

        def connect_slowly(deadline_s: float):
            attempts.append(deadline_s)
            if deadline_s < time.monotonic() + 0.1:
                raise PeerUnavailable("too late")
            time.sleep(0.1)
            return connect(deadline_s)

        monkeypatch.setattr(pipeline, "_open_link", connect_slowly)
        early = put(client, ["early"], timeout_s=0.0)
        assert (early.skipped, early.reason) == (1, NO_ANSWER)
        wait_until(lambda: put(client, ["later"], timeout_s=0.02).skipped == 0)
        assert len(attempts) == 1
        assert all(get(client, ["later"]))


def test_slots_that_come_too_late_do_not_mean_a_full_arena(node, monkeypatch):
    """A busy node lends no slots after a put's deadline. An engine that took this for a full arena would not retry."""
    with node.client() as client:
        for number in range(40):  # more than the arena holds, so that slots are lent only for evicted chunks
            client.put([f"first-{number}"], [bytes(1 << 20)])
        pipeline = client.router.writer.pipeline
        wait = pipeline.wait

        def wait_long(posted, deadline_s: float) -> bool:
            time.sleep(max(0.0, deadline_s - time.monotonic()))
            resume(node)
            return wait(posted, deadline_s + 20.0)

        stop(node)
        monkeypatch.setattr(pipeline, "wait", wait_long)
        late = client.put(["late"], [bytes(1 << 20)], timeout_s=0.05)
        assert (late.skipped, late.reason) == (1, NO_ANSWER)
        monkeypatch.undo()
        assert client.put(["late"], [bytes(1 << 20)]).stored == 1


def test_a_client_that_closes_while_it_connects_leaves_no_connection(node, monkeypatch):
    links, may_end = [], threading.Event()
    with node.client() as client:
        pipeline = client.router.writer.pipeline
        connect = pipeline._open_link

        def connect_slowly(deadline_s: float):
            may_end.wait(20.0)
            link, reader = connect(deadline_s + 20.0)
            links.append(link)
            return link, reader

        monkeypatch.setattr(pipeline, "_open_link", connect_slowly)
        assert put(client, ["early"], timeout_s=0.0).skipped == 1
    may_end.set()
    wait_until(lambda: links and links[0].closed)


def test_a_client_that_gives_up_while_it_connects_leaves_no_connection(node, monkeypatch):
    links, may_end = [], threading.Event()
    connect = LocalConnection.open_link

    def connect_slowly(self, deadline_s: float):
        may_end.wait(20.0)
        link, reader = connect(self, deadline_s + 20.0)
        links.append(link)
        return link, reader

    monkeypatch.setattr(LocalConnection, "open_link", connect_slowly)
    with pytest.raises(PeerUnavailable, match=NO_ANSWER):
        node.client(timeout_s=0.05)
    may_end.set()
    wait_until(lambda: links and links[0].closed)


@pytest.mark.slow
def test_a_node_that_was_stopped_evicts_nothing_for_a_put_that_has_given_up(node):
    with node.client() as client, node.client() as other:
        assert put(client, ["first"]).stored == 1
        assert put(other, names(500)).stored == 500  # 500 chunks take 25 of the arena's 32 MiB
        before = node.stats()
        stop(node)
        assert put(client, names(400, "late"), timeout_s=0.2).stored == 0
        time.sleep(0.01)  # a put gives up to 1 ms before its deadline
        resume(node)
        wait_until(lambda: node.stats()["requests"]["Lend"] > before["requests"]["Lend"])
        after = node.stats()
        assert after["evicted"] == before["evicted"]
        assert after["lent_nbytes"] - before["lent_nbytes"] <= (32 << 20) // MAX_POOL_SHARE
        assert put(client, names(400, "again")).stored == 400


@pytest.mark.slow
def test_a_put_that_waits_says_what_has_no_answer_yet(node):
    with node.client() as client:
        put(client, names(4))
        client.flush()
        stop(node)
        result = put(client, ["late"], timeout_s=0.1)
        assert (result.stored, result.posted) == (0, 1)
        assert "did not answer" in result.reason
        assert not client.put_one(client.key("one"), content("one"), timeout_s=0.1)
        assert client.flush(timeout_s=0.0).posted == 2
        resume(node)
        assert client.flush() == PutResult(2, 0, 0)


def test_a_request_that_waits_does_not_hold_up_a_writer(monkeypatch):
    with cluster(1) as running:
        client = running.client(SPACE)
        put(client, names(4))
        entered, leave = threading.Event(), threading.Event()

        def slow_list() -> dict[str, object]:
            entered.set()
            assert leave.wait(10.0)
            return {}

        monkeypatch.setattr(running.nodes[0].reconciler, "list", slow_list)
        thread = threading.Thread(target=client.namespaces)
        thread.start()
        assert entered.wait(5.0)
        assert put(client, names(4, "meanwhile")).stored == 4
        leave.set()
        thread.join()


@pytest.mark.slow
def test_posted_puts_that_are_lost_are_reported_and_nothing_raises(node):
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
        done = client.flush(timeout_s=1.0)
        assert done.posted == 0
        assert done.stored + done.skipped >= posted
        node.start()
        wait_until(lambda: put(client, ["again"]).skipped == 0)
        get(client, [f"late-{number}" for number in range(40)])


# -- slow and interrupted puts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_chunks_that_took_too_long_to_write_are_committed_all_the_same(node, monkeypatch, wait: bool):
    """Without a commit, the slots would stay lent until the connection ends, and no other put could use them."""
    with node.client() as client, node.client() as other:
        put(client, names(4))
        threads, late = client.router.copy_threads, names(12)[4:]
        fill = threads.fill

        def slow_fill(*arguments):
            put(other, late[3:4])  # another client stores this chunk first
            time.sleep(0.3)
            return fill(*arguments)

        monkeypatch.setattr(threads, "fill", slow_fill)
        result = client.put(late, [content(name) for name in late], timeout_s=0.2, wait=wait)
        assert result.skipped == 0
        monkeypatch.undo()
        client.flush()
        assert all(get(client, late))
        wait_until(lambda: lent_nbytes(node) == at_hand_nbytes(client) + at_hand_nbytes(other))


def test_slots_of_an_idle_pool_go_back_though_the_call_is_late(node, monkeypatch):
    with node.client() as client:
        put(client, names(16))
        assert starts_at_hand(client)
        before = time.monotonic
        monkeypatch.setattr("raykv.client.slot_supply.time.monotonic", lambda: before() + POOL_IDLE_S + 1.0)
        client.put(["other"], [bytes(100)], timeout_s=0.0)
        monkeypatch.undo()
        assert lent_nbytes(node) <= 4096 * MAX_POOL_SLOTS


def test_an_idle_pool_does_not_cost_the_put_that_finds_the_node_restarted(node, monkeypatch):
    with node.client() as client:
        put(client, names(8))
        client.flush()
        node.kill()
        node.start()
        before = time.monotonic
        monkeypatch.setattr("raykv.client.slot_supply.time.monotonic", lambda: before() + POOL_IDLE_S + 1.0)
        done = client.put(["after"], [content("after")], timeout_s=20.0)
        assert (done.stored, done.reason) == (1, "")


def test_chunks_of_several_sizes_have_one_deadline_and_one_message(node):
    with node.client() as client:
        assert client.put(names(3), [bytes(100), bytes(200), bytes(300)]).stored == 3
        assert node.stats()["requests"]["Commit"] == 1
        stop(node)
        began_s = time.monotonic()
        assert client.put(names(40, "late"), [bytes(100 + number) for number in range(40)], timeout_s=0.3).stored == 0
        assert time.monotonic() - began_s < 1.5
        resume(node)


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
lock = embedded.nodes[0].lock
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
into = [bytearray(4096) for _ in range(100)]
for hit, chunk in zip(reader.get([f"k{number}" for number in range(100)], into).hits, into):
    assert not hit or chunk == b"A" * 4096
client.close()
embedded.close()
"""


@pytest.mark.slow
def test_a_put_that_is_interrupted_harms_neither_bytes_nor_the_client():
    """As with Control-C in a notebook while the node is busy."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout


def test_who_waits_for_another_threads_call_waits_no_longer_than_its_deadline(node):
    with node.client() as client:
        put(client, names(4))
        client.flush()
        with client.router.writer.pipeline.lock:
            began_s = time.monotonic()
            result = put(client, ["late"], timeout_s=0.2)
            assert "busy" in result.reason
            assert 0.15 < time.monotonic() - began_s < 5.0
        assert put(client, ["late"]).stored == 1


# -- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_slots_of_a_killed_client_come_back_after_quarantine(node):
    holder = run(HOLDER, node.local_address)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    assert lent_nbytes(node) > 0
    kill(holder)
    wait_until(lambda: lent_nbytes(node) == 0)
    stats = node.stats()
    assert (stats["committed"], stats["chunks"]) == (49, 49)
    with node.client() as client:
        assert put(client, names(40)).stored == 40
        assert all(get(client, names(40)))


@pytest.mark.slow
def test_slots_lent_by_a_node_that_died_are_not_written_to_later(node, monkeypatch):
    """The next process quarantines these slots for some time. A client that is idle for longer must not use them."""
    with node.client() as idle, node.client() as busy:
        put(idle, names(40))
        old = starts_at_hand(idle)
        assert old
        node.kill()
        node.start()
        view = busy.router.local.reader.arena.view
        before = {start: bytes(view[start : start + NBYTES]) for start in old}
        now = time.monotonic
        monkeypatch.setattr("raykv.client.slot_supply.time.monotonic", lambda: now() + TRUST_S)
        assert put(idle, ["new"]).skipped == 0
        monkeypatch.undo()
        assert {start: bytes(view[start : start + NBYTES]) for start in old} == before
        assert put(busy, names(60)).skipped == 0
        assert all(get(busy, [*names(60), "new"]))


@pytest.mark.slow
def test_a_slot_whose_node_just_died_is_lent_to_nobody_else(node):
    with node.client() as client, node.client() as other:
        put(client, names(40))
        old = set(starts_at_hand(client))
        assert old
        node.kill()
        node.start()
        assert put(client, ["late"]).stored == 1
        assert all(get(client, ["late"]))
        big = names(20, "big")
        assert other.put(big, [bytes([n]) * (1 << 20) for n in range(20)]).stored == 20
        assert all(get(other, ["late"]))
        columns = other.router.local.reader.table.columns
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
def test_what_was_reported_as_stored_is_there_however_often_the_node_dies(node, rng):
    """Some puts return while the node is dead or dying. All chunks that they report as stored must be there."""
    stopping = threading.Event()
    stored: list[str] = []

    def write(client, writer: int) -> None:
        number = 0
        while not stopping.is_set() and len(stored) < 300:
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
    wait_until(lambda: len(stored) > 60)
    stopping.set()
    for thread in threads:
        thread.join()
    print(f"{len(stored)} chunks were reported as stored")
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
    counts = [writer.communicate(timeout=60)[0].split() for writer in writers]
    print(counts)
    assert sum(int(stored) for stored, _ in counts) == 300 == node.stats()["committed"]
    assert all(int(stored) + int(existed) == 300 for stored, existed in counts)


def policy_of(task: int) -> int | None:
    try:
        return os.sched_getscheduler(task)
    except ProcessLookupError:
        return None  # the thread has just ended


@pytest.mark.skipif(os.sched_getscheduler(0) != os.SCHED_OTHER, reason="somebody has chosen how these tests run")
def test_a_nodes_threads_do_not_interrupt_this_hosts_readers_and_writers(node):
    """Threads use SCHED_BATCH. Those that serve other hosts do not, because clients there wait for each answer."""
    with node.client() as client, node.client(local=False) as remote:
        put(client, names(2))
        assert remote.stats()
        tasks = [int(task.name) for task in Path(f"/proc/{node.process.pid}/task").iterdir()]
        policies = [policy_of(task) for task in tasks if task != node.process.pid]
        assert (
            policies.count(os.SCHED_BATCH) >= 4
        )  # heartbeat, announcer, reclaimer, and the thread that serves `client`
        assert policies.count(os.SCHED_OTHER) >= 1
        assert os.sched_getscheduler(node.process.pid) == os.SCHED_OTHER


def test_slots_of_a_broken_connection_are_not_written_to_over_the_next_one(node, monkeypatch):
    """While a put waits for slots, the connection breaks, and another thread makes a new one."""
    with node.client() as client:
        put(client, names(30))
        assert starts_at_hand(client)
        pipeline = client.router.writer.pipeline
        wait, calls = pipeline.wait, []

        def reconnect_meanwhile(posted, deadline_s):
            calls.append(posted)
            if len(calls) > 1:
                return wait(posted, deadline_s)
            until_s = time.monotonic() + 5.0
            with pipeline.lock:
                pipeline.drop_locked("broken")
            assert wait(pipeline.post(messages.GetView(), deadline_s=until_s), until_s)
            return False

        pipeline.trusted_until_s = 0.0
        monkeypatch.setattr(pipeline, "wait", reconnect_meanwhile)
        result = client.put(["late"], [content("late")], timeout_s=0.0)
        assert (result.stored, result.posted, result.skipped) == (0, 0, 1)
        monkeypatch.undo()
        assert put(client, ["late"]).stored == 1


@pytest.mark.parametrize(
    "answer",
    [
        messages.Done(),
        messages.Committed(()),
        messages.Committed((messages.CommittedRun(unused=b"abc"),)),
        messages.Committed((messages.CommittedRun(unused=b"\xff" * 8),)),
        messages.Committed((messages.CommittedRun(rows=b"1234", offsets=b"1"),)),
        messages.Committed((messages.CommittedRun(problem="refused"),)),
        messages.Failure("LostError", "unknown group"),
        messages.Failure("UsageError", "no"),
    ],
)
def test_any_answer_to_a_commit_is_survived(answer, monkeypatch):
    with cluster(1) as running:
        client, node = running.client(SPACE), running.nodes[0]
        put(client, names(2))
        respond = node.answer

        def odd(request, session):
            return Reply(answer) if isinstance(request, messages.Commit) else respond(request, session)

        monkeypatch.setattr(node, "answer", odd)
        for wait in (True, False):
            result = put(client, [f"late-{wait}", f"more-{wait}"], wait=wait)
            print(result)
            assert result.stored + result.skipped + result.posted == 2
        assert client.flush().posted == 0
        monkeypatch.undo()
        assert put(client, names(3)).skipped == 0
