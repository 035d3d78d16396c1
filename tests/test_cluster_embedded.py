"""Whole clusters in one process. Some tests lose messages on purpose."""

import asyncio
import ctypes
import hashlib
import random
import threading
import time
from functools import partial

import numpy as np
import pytest

import raykv
from raykv.client import parallel
from raykv.client.router import Router
from raykv.client.slot_pool import TRUST_S
from raykv.config import ClientConfig
from raykv.embedded import EmbeddedCluster
from raykv.errors import CapacityError, ConfigError, LostError, NamespaceMismatch, PeerUnavailable, UsageError
from raykv.memory.copying import checksum_of
from raykv.node import announcer
from raykv.protocol import messages
from raykv.transport.base import Reply
from raykv.transport.link import Link
from tests.support.clients import remote_client

SPACE = raykv.Namespace(model="m")
NBYTES = 10_000


def content(name: str, nbytes: int = NBYTES) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


def names(count: int, prefix: str = "chunk") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def put(client: raykv.Client, keys: list[str], nbytes: int = NBYTES, **options) -> raykv.PutResult:
    return client.put(keys, [content(key, nbytes) for key in keys], **options)


def get(client: raykv.Client, keys: list[str], nbytes: int = NBYTES, **options) -> raykv.GetResult:
    """Read chunks, and check the bytes of each hit."""
    into = [bytearray(nbytes) for _ in keys]
    result = client.get(keys, into, **options)
    for key, buffer, hit in zip(keys, into, result.hits, strict=True):
        assert not hit or bytes(buffer) == content(key, nbytes), f"wrong bytes for {key}"
    return result


def cluster(nodes: int, **options) -> EmbeddedCluster:
    return raykv.embedded(nodes, **{"arena_nbytes": "16 MiB", "extent_nbytes": "1 MiB", "heartbeat_s": 0.01, **options})


def stats_of(running: EmbeddedCluster, node: int) -> dict:
    return running.nodes[node].stats()


# -- put, match, get --------------------------------------------------------------------------------------------------


def test_chunks_are_found_from_every_node_and_the_path_is_told():
    with cluster(3) as running:
        assert put(running.client(SPACE, node=0), names(20)) == raykv.PutResult(stored=20, existed=0, skipped=0)
        running.settle()
        here, there = running.client(SPACE, node=0), running.client(SPACE, node=2)
        assert here.match(names(20)) == there.match(names(20)) == raykv.Match(20, ("node-0",) * 20, 0, (NBYTES,) * 20)
        assert get(here, names(20)) == raykv.GetResult((True,) * 20, {"shm": 20 * NBYTES}, {("node-0", "shm"): 20})
        assert get(there, names(20)) == raykv.GetResult((True,) * 20, {"tcp": 20 * NBYTES}, {("node-0", "tcp"): 20})


def test_on_one_host_another_nodes_memory_is_read_directly():
    with cluster(2, separate_hosts=False) as running:
        put(running.client(SPACE, node=0), names(5))
        running.settle()
        assert get(running.client(SPACE, node=1), names(5)).chunks_by_source == {("node-0", "shm"): 5}


def test_one_get_gathers_from_many_holders():
    with cluster(4) as running:
        for node in range(4):
            put(running.client(SPACE, node=node), names(8, f"of-{node}"))
        running.settle()
        wanted = [name for node in range(4) for name in names(8, f"of-{node}")]
        random.Random(3).shuffle(wanted)
        result = get(running.client(SPACE, node=1), wanted)
        assert result.prefix == 32
        assert result.chunks_by_source == {(f"node-{n}", "shm" if n == 1 else "tcp"): 8 for n in range(4)}


def test_a_match_is_a_prefix_and_a_get_is_not():
    with cluster(2) as running:
        client = running.client(SPACE, node=1)
        put(running.client(SPACE, node=0), ["a", "b", "d"])
        running.settle()
        assert client.match(["a", "b", "c", "d"]).count == 2
        assert get(client, ["a", "b", "c", "d"]).hits == (True, True, False, True)
        assert get(client, ["a", "b", "c", "d"]).prefix == 2


def test_nothing_is_written_twice():
    with cluster(1) as running:
        client = running.client(SPACE)
        put(client, ["a", "b"])
        assert put(client, ["a", "c", "b", "c"]) == raykv.PutResult(stored=1, existed=3, skipped=0)


def test_chunks_in_pieces_of_any_shape():
    with cluster(2) as running:
        value = np.frombuffer(content("x", 4096), np.uint16).reshape(4, 512)
        running.client(SPACE, node=0).put(["x"], [list(value)])
        running.settle()
        for node in range(2):
            into = np.zeros((2, 1024), np.uint16)
            assert running.client(SPACE, node=node).get(["x"], [[into[0], into[1, :1000], into[1, 1000:]]]).hits == (
                True,
            )
            assert into.tobytes() == value.tobytes()


def test_chunks_of_many_sizes_in_one_call():
    with cluster(2) as running:
        sizes = [1, 4096, 4096, 4097, 100_000, 1 << 20]
        keys = names(len(sizes))
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert running.client(SPACE, node=0).put(keys, values).stored == len(sizes)
        running.settle()
        into = [bytearray(size) for size in sizes]
        assert running.client(SPACE, node=1).get(keys, into).prefix == len(sizes)
        assert into == values


def test_no_keys_at_all():
    with cluster(2) as running:
        client = running.client(SPACE)
        assert client.put([], []) == raykv.PutResult(0, 0, 0)
        assert client.get([], []).hits == ()
        assert client.match([]) == raykv.Match(0)
        assert client.delete([]) == 0


def test_two_namespaces_share_nothing():
    with cluster(2) as running:
        put(running.client(SPACE), ["a"])
        running.settle()
        for other in (SPACE.with_fields(salt="s"), SPACE.with_fields(lora="l"), raykv.Namespace(model="n")):
            for node in range(2):
                assert get(running.client(SPACE, node=node).using(other), ["a"]).hits == (False,)


def test_delete_takes_chunks_from_other_nodes_too():
    with cluster(3) as running:
        put(running.client(SPACE, node=0), names(6))
        running.settle()
        assert running.client(SPACE, node=2).delete(names(3)) == 3
        running.settle()
        assert get(running.client(SPACE, node=1), names(6)).hits == (False,) * 3 + (True,) * 3


def test_delete_takes_every_copy():
    with cluster(3) as running:
        for node in range(3):
            assert put(running.client(SPACE, node=node), names(4)).stored == 4
        assert running.client(SPACE, node=1).delete(names(4)) == 12
        running.settle()
        assert running.client(SPACE, node=2).match(names(4)).count == 0


def test_a_stale_location_is_corrected_by_the_miss():
    with cluster(3) as running:
        put(running.client(SPACE, node=0), names(50))
        running.settle()
        reader = running.client(SPACE, node=1)
        node = running.nodes[0]
        with node.lock:  # the chunks vanish without an announcement
            node.store.delete(reader.keys(names(50)), now_s=time.monotonic())
            node.store.take_changes()
        assert reader.match(names(50)).count == 50
        assert not any(get(reader, names(50)).hits)
        wait_until(lambda: reader.match(names(50)).count == 0)
        put(running.client(SPACE, node=2), names(50))
        wait_until(lambda: get(reader, names(50)).prefix == 50)


def test_bytes_that_are_not_what_was_announced_are_not_stored():
    with cluster(1) as running:
        link = Link.connect(running.address(), b"", deadline_s=time.monotonic() + 5)
        link.call(messages.OpenNamespace(b'{"model": "m"}'), deadline_s=time.monotonic() + 5)
        client = running.client(SPACE)
        sums = np.array([checksum_of([memoryview(content("a"))]), 12345], np.uint64).tobytes()
        request = messages.Write(client.keys(["a", "b"]).tobytes(), NBYTES, group=SPACE.group.digest)
        pieces = [memoryview(content("a")), memoryview(content("b"))]
        until_s = time.monotonic() + 5
        count = link.push(request, lambda granted: [pieces], lambda: messages.Checksums(sums), deadline_s=until_s)
        assert count == messages.Count(1)
        assert get(client, ["a", "b"]).hits == (True, False)
        assert stats_of(running, 0)["used_nbytes"] == 12288
        link.close()


def test_a_ticket_spares_the_lookup():
    with cluster(2) as running:
        producer, consumer = running.client(SPACE, node=0), running.client(SPACE, node=1)
        put(producer, names(4))
        ticket = raykv.Ticket.from_json(producer.ticket(names(4)).to_json())
        before = [stats_of(running, node)["requests"].get("Locate", 0) for node in range(2)]
        assert consumer.match(names(4), ticket=ticket) == raykv.Match(4, ("node-0",) * 4)
        assert get(consumer, names(4), ticket=ticket).prefix == 4
        assert [stats_of(running, node)["requests"].get("Locate", 0) for node in range(2)] == before
        with pytest.raises(NamespaceMismatch, match="model"):
            consumer.using(raykv.Namespace(model="n")).match(names(4), ticket=ticket)


def test_the_async_face():
    with cluster(2) as running:

        async def use() -> list[bool]:
            client = raykv.AsyncClient(running.client(SPACE))
            assert (await client.put(["a"], [content("a")])).stored == 1
            assert (await client.match(["a"])).count == 1
            into = [[bytearray(NBYTES)] for _ in range(8)]
            results = await asyncio.gather(*(client.get(["a"], one) for one in into))
            with await client.pin(["a"]) as pins:
                assert bytes(pins.views[0] or b"") == content("a")
            assert len((await client.stats())["nodes"]) == 2
            assert await client.delete(["a"]) == 1
            return [result.hits[0] and bytes(one[0]) == content("a") for result, one in zip(results, into, strict=True)]

        assert asyncio.run(use()) == [True] * 8


# -- clients on a host without a node ---------------------------------------------------------------------------------


def test_a_client_without_a_node_on_its_host_stores_on_the_owner():
    with cluster(3) as running, remote_client(running) as client:
        assert put(client, names(10)) == raykv.PutResult(10, 0, 0)
        assert put(client, names(12)) == raykv.PutResult(2, 10, 0)
        owner = client.view().ring.nodes[client.view().ring.owners(client.keys(names(1)))[0]]
        running.settle()
        assert client.match(names(12)).holders == (owner,) * 12
        assert get(client, names(12)).chunks_by_source == {(owner, "tcp"): 12}
        with pytest.raises(PeerUnavailable, match="no node"):
            client.pin(names(1))
        assert client.reserve(names(1), 10).reason


def test_a_wrong_secret_is_refused_with_words():
    with cluster(1) as running:
        with pytest.raises(raykv.TransientError, match="secret"):
            remote_client(running, secret="00" * 32)
        with pytest.raises(ConfigError, match="hexadecimal"):
            remote_client(running, secret="not hex")
        with pytest.raises(ConfigError, match="secret"):
            remote_client(running, secret=None)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_chunk_larger_than_an_extent_names_the_field():
    with cluster(1) as running, remote_client(running) as distant:
        for client in (running.client(SPACE), distant):
            with pytest.raises(UsageError, match="extent_nbytes"):
                client.put(["big"], [bytes((1 << 20) + 1)])
            with pytest.raises(UsageError, match="at least 1"):
                client.put(["empty"], [b""])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.put(["a", "b"], [b"x"]), "'values': 1 entries for 2 keys"),
        (lambda c: c.get(["a"], []), "'into': 0 entries for 1 keys"),
        (lambda c: c.get(["a"], [b"read-only"]), "read-only"),
        (lambda c: c.put(["a"], [np.zeros((4, 4))[:, 1]]), "not contiguous"),
        (lambda c: c.put(["a"], ["text"]), "str is not a buffer"),
        (lambda c: c.put(["a"], [np.zeros(2, "M8[s]")]), "not a buffer"),
        (lambda c: c.match(np.zeros((2, 3), np.uint64)), r"shape \[2, 3\]"),
        (lambda c: c.match(np.zeros((2, 2), np.int64)), "int64"),
        (lambda c: c.put(["a"], [b"x"], depth=-1), "depth"),
        (lambda c: c.put(["a"], [b"x"], depth=1 << 63), "depth"),
        (lambda c: c.chain([-1]), "token ids"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, words):
    with cluster(1) as running:
        client = running.client(SPACE)
        with pytest.raises(UsageError, match=words):
            call(client)
        assert put(client, ["a"]).stored == 1  # the wrong call has broken nothing
        assert not stats_of(running, 0)["errors"].get("bug")


def test_a_buffer_of_another_length_is_a_miss_and_does_no_harm_to_others():
    with cluster(3) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        for node in range(3):
            for nbytes in (0, 1, NBYTES - 1, NBYTES + 1):
                assert running.client(SPACE, node=node).get(["a"], [bytearray(nbytes)]).hits == (False,)
        assert get(running.client(SPACE, node=1), ["a"]).hits == (True,)
        assert get(running.client(SPACE, node=2), ["a"]).hits == (True,)
        assert stats_of(running, 0)["corrupt"] == 0


# -- a full arena -----------------------------------------------------------------------------------------------------


def test_a_full_arena_is_a_result():
    with cluster(1, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as running:
        client = running.client(SPACE)
        held = [running.client(SPACE).reserve(names(16, f"held-{number}"), 64 << 10) for number in range(2)]
        assert [len(each.views) for each in held] == [8, 8], "each connection gets half of the arena"
        result = put(client, names(3))
        assert (result.stored, result.skipped, result.reason) == (0, 3, "full")
        held[0].abort()
        assert put(client, names(3)).stored == 3


def test_pinned_chunks_outlast_any_pressure():
    with cluster(1, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as running:
        client = running.client(SPACE)
        put(client, names(4, "kept"))
        with client.pin(names(5, "kept")) as pins:
            for number in range(50):
                put(client, names(16, f"flood-{number}"))
            assert [None if view is None else bytes(view) for view in pins.views] == [
                *(content(name) for name in names(4, "kept")),
                None,
            ]
            assert all(view.readonly for view in pins.views if view is not None)
            assert client.delete(names(4, "kept")) == 4
            assert get(client, names(4, "kept")).hits == (False,) * 4
            for number in range(50):
                put(client, names(16, f"flood-{number}"))
            assert bytes(pins.views[3] or b"") == content("kept-3"), "deleted, and held until the pins end"
            assert pins.valid()
        assert stats_of(running, 0)["evicted"] > 500


def test_pins_end_with_their_connection():
    with cluster(1) as running:
        holder, other = running.client(SPACE), running.client(SPACE)
        put(holder, ["a"])
        holder.pin(["a"])
        assert other.delete(["a"]) == 1
        pins = running.nodes[0].store.table.columns.pins
        assert pins.any(), "held, although it was deleted"
        holder.close()
        wait_until(lambda: not pins.any())


def test_a_reservation_dies_with_its_connection():
    with cluster(1) as running:
        writer, other = running.client(SPACE), running.client(SPACE)
        room = writer.reserve(["a"], NBYTES)
        room.views[0][:] = bytes(NBYTES)
        writer.close()
        wait_until(lambda: stats_of(running, 0)["lent_nbytes"] == 0)
        assert not room.valid()
        assert put(other, ["a"]).stored == 1
        room.views[0][:] = bytes(NBYTES)  # a late write does no harm: the slot is in quarantine
        assert get(other, ["a"]).hits == (True,)
        assert room.commit().skipped == 1
        assert get(other, ["a"]).hits == (True,)


def test_of_two_reservations_of_one_key_the_second_commit_returns_its_slot():
    with cluster(1) as running:
        first, second = running.client(SPACE), running.client(SPACE)
        rooms = [client.reserve(["a", "b"], NBYTES) for client in (first, second)]
        for room in rooms:
            for index, view in zip(room.index, room.views, strict=True):
                view[:] = content("ab"[index])
        assert rooms[1].commit() == raykv.PutResult(2, 0, 0)
        assert rooms[0].commit() == raykv.PutResult(0, 2, 0)
        assert get(first, ["a", "b"]).prefix == 2
        assert first.reserve(["a", "c"], NBYTES).index.tolist() == [1]


def test_a_reservation_is_valid_while_its_connection_answers(faults, monkeypatch):
    with cluster(1) as running:
        client = running.client(SPACE, breaker_s=0.0)
        lost, kept = client.reserve(["a"], NBYTES), client.reserve(["b"], NBYTES)
        assert lost.valid()
        assert kept.valid()
        later = time.monotonic() + TRUST_S
        monkeypatch.setattr("raykv.client.pipeline.time.monotonic", lambda: later)
        asked = stats_of(running, 0)["requests"]["Lend"]
        assert kept.valid(timeout_s=100.0)
        assert stats_of(running, 0)["requests"]["Lend"] == asked + 1, "after TRUST_S the node is asked"
        monkeypatch.undo()
        assert kept.commit().stored == 1
        assert not kept.valid()
        faults.loss = 1.0
        assert put(client, ["d"]).skipped == 1, "the connection breaks, and the leases end"
        faults.loss = 0.0
        assert not lost.valid()
        assert put(client, ["e"]).stored == 1, "over another connection"
        assert not lost.valid()
        assert lost.commit().skipped == 1


def test_aborted_slots_go_back_even_if_the_abort_does_not_wait():
    with cluster(1) as running:
        client = running.client(SPACE)
        put(client, ["x"])
        room = client.reserve(names(60), NBYTES)
        lent = stats_of(running, 0)["lent_nbytes"]
        room.abort(timeout_s=0.0)
        wait_until(lambda: stats_of(running, 0)["lent_nbytes"] <= lent - 60 * 12288)
        assert not room.valid()


def test_a_late_call_does_not_end_the_leases_of_others():
    with cluster(2) as running:
        client = running.client(SPACE)
        room, pins = client.reserve(["a"], NBYTES), client.pin(["x"])
        assert client.match(["x", "y"], timeout_s=0.0).count == 0
        assert get(client, ["x"], timeout_s=0.0).hits == (False,)
        assert put(client, names(50), timeout_s=0.0).stored == 0
        room.views[0][:] = content("a")
        assert room.commit().stored == 1
        assert pins.valid()
        pins.release()


@pytest.mark.parametrize("error", [UsageError, CapacityError, LostError])
def test_an_owner_that_refuses_what_it_is_told_does_not_end_its_peers(error, monkeypatch):
    def refuse(request, session):
        raise error("not here")

    with cluster(2) as running:
        monkeypatch.setitem(running.nodes[1].handlers, messages.Announce, refuse)
        client = running.client(SPACE, node=0)
        assert put(client, names(40), chained=False).stored == 40
        wait_until(lambda: stats_of(running, 0)["errors"].get("announce", 0) > 0)
        assert put(client, ["more"]).stored == 1
        monkeypatch.undo()
        put(client, names(40, "later"), chained=False)
        running.settle()
        assert running.nodes[0].failure is None
        assert running.client(SPACE, node=1).match(names(40, "later")).count == 40


@pytest.mark.parametrize("error", [CapacityError, LostError])
def test_a_put_to_another_host_that_has_no_room_for_the_namespace_stores_nothing(error, monkeypatch):
    def refuse(request, session):
        raise error("no room")

    with cluster(1) as running:
        config = {"address": running.nodes[0].member.address, "secret": running.secret}
        with raykv.Client(SPACE, Router(ClientConfig.load(config))) as client:
            monkeypatch.setitem(running.nodes[0].handlers, messages.Write, refuse)
            monkeypatch.setitem(running.nodes[0].handlers, messages.OpenNamespace, refuse)
            assert client.router.local is None
            result = put(client, ["a", "b"])
        assert (result.stored, result.existed, result.skipped) == (0, 0, 2)
        assert "no room" in result.reason


def test_a_lease_is_not_taken_to_another_connection(faults):
    with cluster(1) as running:
        client = running.client(SPACE, breaker_s=0.0)
        put(client, ["p"])
        room, pins = client.reserve(["a"], NBYTES), client.pin(["p"])
        faults.loss = 1.0
        assert put(client, ["b"]).skipped == 1, "the connection breaks, and the leases end"
        assert client.match(["c"]).count == 0
        faults.loss = 0.0
        assert room.commit().skipped == 1
        pins.release()
        assert put(client, ["b"]).stored == 1


# -- members join and die ---------------------------------------------------------------------------------------------


def wait_until(condition, timeout_s: float = 10.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.01)


def test_a_new_node_learns_what_it_owns():
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(200))
        running.settle()
        stale = running.client(SPACE, node=1)
        assert stale.view().members[-1].node_id == "node-1"
        running.add()
        running.settle()
        assert stats_of(running, 2)["located"] > 30  # about a third of the keys
        assert sum(stats_of(running, node)["located"] for node in range(3)) == 200
        assert get(stale, names(200)).prefix == 200
        assert get(running.client(SPACE, node=2), names(200)).prefix == 200
        assert stale.view().epoch == running.membership.logic.view.epoch


@pytest.mark.slow
def test_a_dead_node_costs_its_own_chunks_and_no_more():
    with cluster(3) as running:
        for node in range(3):
            put(running.client(SPACE, node=node), names(30, f"of-{node}"))
        running.settle()
        reader = running.client(SPACE, node=2)
        wanted = [name for node in range(3) for name in names(30, f"of-{node}")]
        assert get(reader, wanted).prefix == 90
        running.kill(0)
        began_s = time.monotonic()
        hits = get(reader, wanted, timeout_s=2.0).hits
        assert time.monotonic() - began_s < 2.5
        assert not any(hits[:30])
        assert all(hits[60:])
        running.settle()  # the other nodes take over the dead node's keys
        assert get(reader, wanted).hits == (False,) * 30 + (True,) * 60
        assert reader.match(names(30, "of-0")).count == 0


@pytest.mark.slow
def test_a_chunk_whose_owner_is_away_does_not_exist_but_is_not_absent():
    with cluster(2) as running:
        client, there = running.client(SPACE, node=0), running.client(SPACE, node=1)
        put(there, names(20))
        running.settle()
        assert client.exists(names(20)).all()
        assert not client.absent(names(20)).any()
        assert client.absent(names(20, "unknown")).all()
        running.kill(1)
        owned = client.router.view(time.monotonic() + 1.0).ring.shares(client.keys(names(20)))["node-1"]
        exists, absent = client.exists(names(20), timeout_s=1.0), client.absent(names(20), timeout_s=1.0)
        assert len(owned)
        assert not exists[owned].any()
        assert not absent[owned].any()


def test_a_client_that_only_meets_a_dead_owner_asks_for_the_new_view():
    with cluster(2) as running:
        stale = running.client(SPACE, node=0)
        ring = stale.view().ring
        theirs = [name for name in names(100) if ring.nodes[ring.owners(stale.keys([name]))[0]] == "node-1"]
        running.kill(1)
        running.add()
        put(running.client(SPACE, node=2), theirs)
        running.settle()
        assert get(stale, theirs).prefix == len(theirs)


@pytest.mark.slow
def test_when_the_local_node_is_dead_reads_go_on_and_writes_are_skipped():
    with cluster(3) as running:
        client = running.client(SPACE, node=0, breaker_s=0.05)
        put(client, names(5))
        put(running.client(SPACE, node=1), names(5, "other"))
        running.settle()
        running.kill(0)
        assert get(client, names(5)).chunks_by_source == {("node-0", "shm"): 5}
        result = put(client, names(3, "new"))
        assert (result.skipped, result.stored) == (3, 0)
        assert "away" in result.reason or "lost" in result.reason
        assert client.reserve(["x"], 10).views == []
        running.settle()
        running.add()
        running.settle()
        wait_until(lambda: get(client, names(5, "other")).prefix == 5)
        assert client.view().epoch == running.membership.logic.view.epoch


def test_a_reborn_directory_learns_the_cluster_from_its_nodes():
    with cluster(3) as running:
        put(running.client(SPACE), names(5))
        running.settle()
        epoch = running.membership.logic.view.epoch
        with running.membership._lock:
            running.membership.logic.__init__(member_timeout_s=1.0)
        wait_until(lambda: len(running.membership.logic.view.members) == 3)
        assert running.membership.logic.view.epoch >= epoch
        assert get(running.client(SPACE, node=2), names(5)).prefix == 5


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_chunk_is_a_miss_and_is_dropped():
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(3))
        running.settle()
        store = running.nodes[0].store
        keys = running.client(SPACE).keys(names(3))
        row = int(store.table.find(keys)[1])
        store.arena.view[int(store.table.columns.page[row]) * 4096 + 77] ^= 1
        reader = running.client(SPACE, node=1)
        assert get(reader, names(3)).hits == (True, False, True)
        assert stats_of(running, 0)["corrupt"] == 1
        assert stats_of(running, 0)["chunks"] == 2
        running.settle()
        assert reader.match(names(3)).count == 1
        assert put(running.client(SPACE, node=0), names(3)).stored == 1
        assert get(running.client(SPACE, node=0), names(3)).prefix == 3


def test_whoever_asks_for_it_sees_damage_in_shared_memory_too():
    with cluster(1) as running:
        client = running.client(SPACE, verify="always")
        put(client, ["a"])
        running.settle()
        store = running.nodes[0].store
        store.arena.view[int(store.table.columns.page[int(store.table.find(client.keys(["a"]))[0])]) * 4096] ^= 1
        assert get(client, ["a"]).hits == (False,)


# -- random faults ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.05, 0.3])
def test_on_a_bad_network_every_get_is_right_or_a_miss(loss, faults, rng):
    with cluster(4, extent_nbytes="256 KiB") as running:
        clients = [running.client(SPACE, node=node, breaker_s=0.01) for node in range(4)]
        for number in range(0, 12, 2):  # so that there are hits even if few later puts succeed
            put(rng.choice(clients), [f"{number}/{place}" for place in range(7)])
        running.settle()
        faults.loss, faults.delay_s = loss, 0.0005
        hits = asked = 0
        for step in range(150):
            chain = [f"{rng.randrange(12)}/{place}" for place in range(rng.randrange(1, 8))]
            client = rng.choice(clients)
            if rng.random() < 0.4:
                done = put(client, chain)
                assert done.stored + done.existed + done.skipped == len(chain)
            else:
                result = get(client, chain, timeout_s=1.0)
                hits, asked = hits + sum(result.hits), asked + len(chain)
            if step == 100:
                running.kill(3)
                clients.pop()
        print(f"{hits} of {asked} chunks arrived")
        assert 0 < hits < asked
        faults.loss = 0.0
        running.settle(timeout_s=30.0)  # longer than ANNOUNCE_DEADLINE_S, after which lost announcements are sent again
        for node in running.nodes[:3]:
            assert node.failure is None
            assert not {
                kind for kind in node.stats()["errors"] if kind not in ("announce", "beat", "Commit", "Reserve", "Pin")
            }


@pytest.mark.slow
def test_a_slow_network_costs_the_deadline_and_no_more(faults):
    with cluster(3) as running:
        put(running.client(SPACE, node=0), names(5))
        running.settle()
        reader = running.client(SPACE, node=1, breaker_s=0.05)
        faults.delay_s = 5.0
        began_s = time.monotonic()
        assert get(reader, names(5), timeout_s=0.2).hits == (False,) * 5
        assert time.monotonic() - began_s < 1.5
        faults.delay_s = 0.0
        wait_until(lambda: get(reader, names(5)).prefix == 5)


def test_links_are_closed_with_the_cluster():
    with cluster(2) as running:
        link = Link.connect(running.address(1), b"", deadline_s=time.monotonic() + 5)
        assert isinstance(link.call(messages.GetView(), deadline_s=time.monotonic() + 5), messages.ViewIs)
    with pytest.raises(PeerUnavailable):
        link.call(messages.GetView(), deadline_s=time.monotonic() + 5)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (messages.Locate, messages.Located((("node-0",),), b"123")),
        (messages.Locate, messages.Located((("node-0",), ("node-9", "node-7")), np.array([7, 1, -5], "<i4").tobytes())),
        (messages.Read, messages.Reading(b"1", b"")),
        (messages.Read, messages.Reading(np.array([NBYTES] * 3, "<u4").tobytes(), b"")),
        (messages.Read, messages.Reading(bytes(12), bytes(24), (("node-0",),), b"123")),
        (messages.Read, messages.Reading(bytes(12), bytes(24), (("node-9",),), np.array([7, 0, -5], "<i4").tobytes())),
        (messages.Read, messages.Done()),
    ],
)
def test_a_member_that_answers_nonsense_costs_a_miss(kind, answer):
    """A peer that knows the secret may still be broken, or of another version."""
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(3))
        running.settle()
        for node in running.nodes:
            node.handlers[kind] = lambda request, session: Reply(answer)
        reader = running.client(SPACE, node=1, timeout_s=0.5)
        assert get(reader, names(3)).prefix == 0
        assert put(reader, names(1, "other")).stored == 1


def test_a_namespace_keeps_to_its_capacity_on_every_node_and_leaves_the_others_alone():
    with cluster(2) as running:
        bounded = [running.client(SPACE, node=node) for node in range(2)]
        other = running.client(SPACE.with_fields(model="other"), node=0)
        assert put(other, names(10)).stored == 10
        quota_nbytes = 5 * 12288  # a chunk of 10 000 bytes takes a slot of three pages
        assert bounded[0].configure(dram_quota_nbytes=quota_nbytes) == 2
        for client in bounded:
            put(client, names(20), chained=False)
            assert sum(get(client, names(20), timeout_s=0.5).hits) >= 5
        for node, client in enumerate(bounded):
            assert int(client.router.local.reader.ready(client.keys(names(20)), now_s=time.monotonic()).sum()) == 5, (
                node
            )
        assert get(other, names(10)).prefix == 10
        with pytest.raises(UsageError, match="dram_quota_nbytes"):
            bounded[0].configure(dram_quota_nbytes=-1)


def test_what_is_done_in_the_background_leaves_the_others_their_threads(monkeypatch):
    """Background tasks that ask several nodes in parallel must finish even if such tasks occupy all worker threads."""
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 2)
    with cluster(2) as running:
        client = running.client(SPACE)
        go, done = threading.Event(), threading.Semaphore(0)

        def report() -> None:
            assert go.wait(5.0)
            client.router.ask_all(messages.GetStats(), client.router.deadline(1.0))
            done.release()

        for _ in range(2):
            client.router.parallel.in_background(report)
        go.set()
        assert done.acquire(timeout=5.0)
        assert done.acquire(timeout=5.0)


def test_a_call_does_not_wait_beyond_its_deadline_for_the_threads_of_others(monkeypatch):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 2)
    with cluster(2) as running:
        client = running.client(SPACE)
        begun, go, late = threading.Semaphore(0), threading.Event(), []

        def hang() -> str:
            begun.release()
            assert go.wait(20.0)
            return "came"

        def hang_three() -> None:
            late.append(client.router.parallel.run({"a": hang, "b": hang, "c": hang}))

        others = threading.Thread(target=hang_three)
        others.start()
        try:
            for _ in range(3):
                assert begun.acquire(timeout=5.0)
            ran, buffer = [], bytearray(8)
            work = {name: partial(ran.append, memoryview(buffer)[:number]) for number, name in enumerate("de")}
            assert client.router.parallel.run(work) == {"d": None, "e": None}
            assert len(ran) == 2, "the calling thread has run them"
            work.clear()
            ran.clear()
            buffer.append(1)  # raises an error if a queue still refers to the buffer
            assert not late
        finally:
            go.set()
            others.join()
        assert late == [{"a": "came", "b": "came", "c": "came"}]
        assert client.stats()["nodes"].keys() == {"node-0", "node-1"}


def test_keys_for_an_owner_that_is_away_take_no_room_from_others(faults, monkeypatch):
    monkeypatch.setattr(announcer, "MAX_RETRIED_KEYS", 16)
    with cluster(3) as running:
        running.settle()
        faults.silence(running.nodes[1])
        client, node = running.client(SPACE, breaker_s=0.0), running.nodes[0]
        for part in range(3):
            failed = node.stats()["errors"].get("announce", 0)
            put(client, names(60, f"part-{part}"), chained=False)
            wait_until(lambda failed=failed: node.stats()["errors"].get("announce", 0) > failed)
        wanted = [name for part in range(3) for name in names(60, f"part-{part}")]
        ring = client.view().ring
        owners = [ring.nodes[number] for number in ring.owners(client.keys(wanted))]
        theirs = [name for name, owner in zip(wanted, owners, strict=True) if owner == "node-2"]
        reader = running.client(SPACE, node=2, breaker_s=0.0)
        wait_until(lambda: reader.match(theirs).count == len(theirs) > 20)
        assert node.stats()["unannounced"] <= len(wanted) - len(theirs)


def test_a_node_that_was_out_for_a_while_announces_all_its_chunks_again(monkeypatch):
    """The others drop the locations of this node's chunks. The node never gets the view in which it is missing."""
    with cluster(3, member_timeout_s=0.3) as running:
        put(running.client(SPACE, node=2), names(60), chained=False)
        running.settle()
        beat = running.membership.beat

        def cut_off(heartbeat):
            if heartbeat.member.node_id == "node-2":
                raise PeerUnavailable("cut off")
            return beat(heartbeat)

        monkeypatch.setattr(running.membership, "beat", cut_off)
        wait_until(lambda: all(running.nodes[n].view.member("node-2") is None for n in (0, 1)))
        monkeypatch.undo()
        wait_until(lambda: all(running.nodes[n].view.member("node-2") is not None for n in (0, 1)))
        running.settle()
        assert get(running.client(SPACE, node=0), names(60)).prefix == 60


def test_a_pause_of_the_directorys_process_removes_no_node():
    """A library that holds the interpreter's lock stops the directory and the nodes alike."""
    with cluster(2, member_timeout_s=2.0) as running:
        put(running.client(SPACE, node=0), names(60), chained=False)
        running.settle()
        view = running.membership.logic.view
        assert len(view.members) == 2
        ctypes.PyDLL(None).sleep(3)  # a call of a PyDLL does not release the lock
        time.sleep(0.3)
        assert running.membership.logic.view == view
        assert get(running.client(SPACE, node=1), names(60)).prefix == 60


def test_a_namespace_that_no_node_can_name_is_refused(tmp_path):
    ssd = {"paths": [tmp_path], "capacity_nbytes": "16 MiB", "segment_nbytes": "1 MiB"}
    with cluster(1, ssd=ssd) as running:
        node = running.nodes[0]
        long = running.client(raykv.Namespace(model="m" * 3000))
        for call in (long.drop_namespace, lambda: long.configure(priority=3), lambda: put(long, ["a"])):
            with pytest.raises(UsageError, match="shorten"):
                call()
        assert node.failure is None
        assert put(running.client(SPACE), ["a"]).stored == 1
