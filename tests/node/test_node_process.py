"""Nodes and clients, each in a process of its own, killed without warning."""

import os
import signal
import threading
import time

import pytest

from tests.support.nodes import NBYTES, get, kill, names, node_process, put, run, wait_until

WRITER = """
import sys
import raykv

client = raykv.connect(raykv.Namespace(model="m"), address=sys.argv[1])
reservation = client.reserve([f"half-{n}" for n in range(5)], 1 << 20)
for view in reservation.views:
    view[: 1 << 19] = bytes(1 << 19)
print(len(reservation.views), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(shm_dir):
    with node_process(shm_dir) as made:
        yield made


def test_a_killed_node_is_read_on_and_comes_back_with_everything(node):
    with node.client() as client, node.client() as other:
        assert put(client, names(40)).stored == 40
        reservation = client.reserve(["unfinished"], NBYTES)
        pins = client.pin(names(3))
        node.kill()

        assert all(get(client, names(40)))
        assert client.match(names(40)).count == 40
        result = put(client, ["new"])
        assert (result.stored, result.skipped) == (0, 1)
        assert result.reason
        assert get(other, ["new"]) == (False,)
        assert reservation.commit().skipped == 1
        assert pins.valid()
        pins.release()

        node.start()
        assert node.stats()["recovered"] == 40
        for each in (client, other):
            wait_until(lambda each=each: put(each, ["new"]).skipped == 0)
            assert all(get(each, [*names(40), "new"]))
            assert get(each, ["unfinished"]) == (False,)
        client.flush(), other.flush()
        assert node.stats()["committed"] == 1
        with node.client(local=False) as remote:
            wait_until(lambda: all(get(remote, names(40))))


@pytest.mark.slow
def test_a_killed_writers_slots_are_quarantined_and_then_free(node):
    """The node cannot know whether a writer that was cut off is dead or still writes."""
    writer = run(WRITER, node.local_address)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "5\n"
    with node.client() as client:
        assert node.stats()["lent_nbytes"] >= 5 << 20
        kill(writer)
        wait_until(lambda: node.stats()["lent_nbytes"] == 0)
        assert node.stats()["used_nbytes"] >= 5 << 20
        assert client.put(["half-0"], [bytes(1 << 20)]).stored == 1, "no key was taken by the killed writer"
        assert client.delete(["half-0"]) == 1
        wait_until(lambda: node.stats()["used_nbytes"] == node.stats()["lent_nbytes"])
        reservation = client.reserve(names(16), 1 << 20)  # half of the arena
        assert len(reservation.views) == 16
        reservation.abort()


@pytest.mark.slow
def test_a_stopped_node_costs_the_deadline_and_local_reads_nothing(node):
    with node.client(timeout_s=0.5) as client, node.client(local=False, timeout_s=0.5) as remote:
        assert put(client, names(5)).stored == 5
        wait_until(lambda: all(get(remote, names(5))))  # until the owner of the keys knows the chunks
        node.process.send_signal(signal.SIGSTOP)
        os.waitpid(node.process.pid, os.WUNTRACED)  # returns when the process has stopped
        began_s = time.monotonic()
        assert not any(get(remote, names(5)))
        new = names(200, "new")  # all 205 chunks fit the arena, so none is evicted later
        first = put(client, new[:1])
        assert (first.stored, first.posted + first.skipped) == (0, 1), "its commit waits for the node"
        assert put(client, new).skipped > 0
        assert all(get(client, names(5)))
        assert time.monotonic() - began_s < 5.0
        node.process.send_signal(signal.SIGCONT)
        wait_until(lambda: put(client, ["new-0"]).skipped == 0)
        wait_until(lambda: all(get(remote, [*names(5), "new-0"])))


@pytest.mark.slow
def test_nodes_killed_under_load_lose_nothing_that_was_committed(node, rng):
    stored: set[str] = set()
    stop = threading.Event()
    skipped = 0

    def write() -> None:
        nonlocal skipped
        step = 0
        with node.client() as client:
            while not stop.is_set():
                step += 1
                keys = names(4, f"load-{step % 100}")  # at most 400 chunks, which all fit into the arena
                result = put(client, keys)
                skipped += result.skipped
                if not result.skipped:
                    stored.update(keys)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2):
            goal = len(stored) + 20
            wait_until(lambda goal=goal: len(stored) >= min(goal, 400))
            time.sleep(rng.random() * 0.05)  # kill the node at a random moment
            node.kill()
            with_certainty = sorted(stored)
            node.start()
            with node.client() as reader:
                assert all(get(reader, with_certainty))
    finally:
        stop.set()
        writer.join()
    assert skipped > 0
    assert node.stats()["chunks"] >= len(stored)

    def only_chunks_use_memory() -> bool:
        stats = node.stats()
        return stats["used_nbytes"] == stats["chunks"] * 53_248 + stats["lent_nbytes"]  # a chunk takes 13 pages

    wait_until(only_chunks_use_memory)  # until the slots that were lent by killed nodes are out of quarantine


@pytest.mark.slow
def test_a_clean_stop_leaves_nothing(node, shm_dir):
    with node.client() as client:
        put(client, names(3))
        assert len(list(shm_dir.iterdir())) == 4  # table, arena, socket, view
        assert all(path.stat().st_mode & 0o077 == 0 for path in shm_dir.iterdir())
        node.process.communicate(timeout=30)
        assert not list(shm_dir.iterdir())
        assert all(get(client, names(3)))  # a client that has mapped the memory can still read
    node.start()
    assert node.stats()["chunks"] == 0
