"""Requests go straight to a node's handlers: the write protocol, reads, leases, errors."""

import random

import numpy as np
import pytest
import xxhash

from raykv.errors import ProtocolError, UsageError
from raykv.node.handlers import admin
from raykv.node.node import Node
from raykv.protocol import codec, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.trace_requests import TracedRequest
from raykv.transport.base import Reply
from raykv.transport.server import MAX_LOG_LINES
from tests.support.nodes import SPACE, Peer, content, keys_of, make_node, running_node

DIGEST = SPACE.group.digest
PAGE = 4096


def numbers(raw: bytes, kind: str = "<i4") -> list[int]:
    return np.frombuffer(raw, kind).tolist()


@pytest.fixture
def node():
    with running_node() as made:
        opened(made).close()
        yield made


def opened(node: Node) -> Peer:
    return Peer(node).open()


def lend(peer: Peer, count: int, nbytes: int = PAGE, **fields) -> messages.Lent:
    return peer.lend(count, nbytes, **fields)


def filled(peer: Peer, names, nbytes: int = PAGE, **fields) -> messages.Run:
    return peer.filled(names, nbytes, **fields)


def commit(peer: Peer, *runs: messages.Run) -> list[messages.CommittedRun]:
    return peer.commit(*runs)


def read(peer: Peer, names, nbytes: int = PAGE) -> list[bool]:
    """Read chunks, and check their bytes and checksums. Returns for each chunk whether it was sent."""
    reply = peer.reply(messages.Read(keys_of(names), group=DIGEST))
    payload = b"".join(reply.outgoing)
    hits = [length > 0 for length in numbers(reply.answer.nbytes, "<u4")]
    assert payload == b"".join(content(name, nbytes) for name, hit in zip(names, hits, strict=True) if hit)
    checksums = numbers(reply.answer.checksums, "<u8")
    for name, hit, checksum in zip(names, hits, checksums, strict=True):
        assert not hit or checksum == xxhash.xxh3_64_intdigest(content(name, nbytes))
    reply.finish(True)
    return hits


def pins(node: Node) -> int:
    return int(node.store.table.columns.pins.sum())


# -- writing ----------------------------------------------------------------------------------------------------------


def test_lend_fill_commit_read(node):
    peer = opened(node)
    run = filled(peer, ["a", "b", "c"], ahead=2)
    assert read(peer, ["a", "b", "c"]) == [False] * 3, "nothing is visible before the commit"
    (done,) = commit(peer, run)
    assert (done.unused, done.problem, len(numbers(done.rows))) == (b"", "", 2)
    assert read(Peer(node), ["a", "b", "c", "d"]) == [True, True, True, False]
    assert peer.session.lent.keys() == set(numbers(done.rows))


def test_of_two_writers_of_one_key_the_second_gets_its_slot_back(node):
    one, two = opened(node), opened(node)
    runs = [filled(peer, ["a", "b"], chained=False) for peer in (one, two)]
    third = filled(two, ["c", "b"], chained=False)
    commit(one, runs[0])
    done = commit(two, runs[1], third)
    assert [numbers(each.unused) for each in done] == [[0, 1], [1]]
    left = {*numbers(runs[1].rows), numbers(third.rows)[1]}
    assert two.session.lent.keys() == left
    two.ask(messages.GiveBack(np.array(sorted(left), "<i4").tobytes()))
    assert two.session.lent.keys() == set()
    assert node.store.lent_nbytes == 0
    assert read(one, ["a", "b", "c"]) == [True] * 3


def test_a_wrong_run_does_not_stop_the_others(node):
    peer, other = opened(node), opened(node)
    good, last = filled(peer, ["a", "b"]), filled(peer, ["y", "z"], nbytes=3 * PAGE)
    wrong = {
        "not lent to this connection": filled(other, ["c"]),
        "'depth'": filled(peer, ["c"], depth=-1),
        "'parent'": filled(peer, ["c"], parent=b"k" * (KEY_NBYTES - 1)),
        "'ttl_s'": filled(peer, ["c"], ttl_s=-1.0),
        "'priority'": filled(peer, ["c"], priority=1000),
        "'positions'": filled(peer, ["c"], positions=np.array([1], "<i4").tobytes()),
        "checksums": messages.Run(keys_of(["c"]), PAGE, lend(peer, 1).rows, b""),
        "another size": messages.Run(keys_of(["c"]), 5 * PAGE, lend(peer, 1).rows, bytes(8)),
        "whole number": messages.Run(keys_of(["c"]), PAGE, b"xyz", bytes(8)),
        "named twice": messages.Run(keys_of(["c", "d"]), PAGE, lend(peer, 1).rows * 2, bytes(16)),
        "does not fit": messages.Run(keys_of(["c"]), 0, lend(peer, 1).rows, bytes(8)),
        "'ahead'": filled(peer, ["c"], ahead=-1),
    }
    before = node.store.lent_nbytes
    done = commit(peer, good, *wrong.values(), last)
    assert [each.problem for each in (done[0], done[-1])] == ["", ""]
    for expected, answer in zip(wrong, done[1:-1], strict=True):
        assert expected in answer.problem
        assert (answer.unused, answer.rows) == (b"", b"")
    assert read(peer, ["a", "b", "c"]) == [True, True, False]
    assert read(peer, ["y", "z"], 3 * PAGE) == [True, True]
    assert before - node.store.lent_nbytes == 2 * PAGE + 6 * PAGE, "slots of refused runs stay lent"


@pytest.mark.parametrize("length", [1, 15, 17, 32])
def test_a_parent_of_the_wrong_length_is_refused(node, length):
    peer = opened(node)
    with pytest.raises(UsageError, match=f"field 'parent': {length} bytes"):
        lend(peer, 1, parent=b"k" * length)
    with pytest.raises(UsageError, match="field 'parent'"):
        peer.ask(messages.Write(keys_of(["a"]), PAGE, parent=b"k" * length, group=DIGEST))
    (done,) = commit(peer, filled(peer, ["a"], parent=b"k" * length))
    assert "field 'parent'" in done.problem


def test_slots_that_are_not_lent_cannot_be_given_back(node):
    one, two = opened(node), opened(node)
    rows = lend(one, 2).rows
    for wrong in (rows, b"\xff" * 4, np.array([99], "<i4").tobytes()):
        with pytest.raises(UsageError, match="not lent"):
            two.ask(messages.GiveBack(wrong))
    with pytest.raises(UsageError, match="named twice"):
        one.ask(messages.GiveBack(rows[:4] * 2))
    one.ask(messages.GiveBack(rows))


@pytest.mark.parametrize("fields", [{"count": -1}, {"count": 1 << 30}, {"count": 1, "ahead": -5}])
def test_impossible_counts_are_refused(node, fields):
    with pytest.raises(UsageError, match="slots in one request"):
        opened(node).ask(messages.Lend(PAGE, **fields, group=DIGEST))


def test_a_cut_connection_leaves_its_slots_in_quarantine_and_ends_its_pins(node):
    peer = opened(node)
    commit(peer, filled(peer, ["a"]))
    peer.ask(messages.Pin(keys_of(["a", "a", "nowhere"])))
    lend(peer, 5)
    assert (pins(node), node.store.lent_nbytes) == (2, 5 * PAGE)
    peer.close()
    assert (pins(node), node.store.lent_nbytes) == (0, 0)
    assert node.store.used_nbytes == 6 * PAGE
    peer.close()


# -- remote writes ----------------------------------------------------------------------------------------------------


def write(peer: Peer, names, *, break_at: int | None = None, damage: tuple[int, ...] = (), **fields):
    """Write as a client on another host does. Returns the answers before and after the payload.

    The connection breaks after `break_at` bytes of the payload. Accepted chunks at the places in `damage` are sent
    damaged.
    """
    reply = peer.reply(messages.Write(keys_of(names), PAGE, group=DIGEST, **fields))
    accepted = [names[place] for place in numbers(reply.answer.positions)]
    chunks = [content(name, PAGE) for name in accepted]
    sums = np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in chunks], "<u8").tobytes()
    for place in damage:
        chunks[place] = b"damaged".ljust(PAGE)
    payload = memoryview(b"".join(chunks))[:break_at]
    for run in reply.incoming:
        for target in run:
            some = min(len(target), len(payload))
            target[:some] = payload[:some]
            payload = payload[some:]
    if break_at is None:
        reply.closing(messages.Checksums(sums))
    return reply.answer, reply.finish(break_at is None)


def test_a_remote_write_stores_what_is_missing(node):
    peer = opened(node)
    commit(peer, filled(peer, ["b"]))
    accepted, count = write(peer, ["a", "b", "c"])
    assert (numbers(accepted.positions), accepted.full, count.count) == ([0, 2], 0, 2)
    assert read(peer, ["a", "b", "c"]) == [True] * 3
    accepted, count = write(peer, ["a", "b", "c"])
    assert (accepted.positions, count.count) == (b"", 0)
    assert (set(peer.session.lent), node.store.lent_nbytes) == (set(), 0)


def test_damaged_and_broken_remote_writes_store_only_whole_chunks(node):
    peer = opened(node)
    _, count = write(peer, ["a", "b", "c"], damage=(1,), chained=False)
    assert count.count == 2
    assert read(peer, ["a", "b", "c"]) == [True, False, True]
    _, count = write(peer, ["x", "y"], break_at=PAGE + 5)
    assert count.count == 0
    assert read(peer, ["x", "y"]) == [False, False]
    assert (set(peer.session.lent), node.store.lent_nbytes) == (set(), 0)


def test_a_remote_write_beyond_the_arena_is_cut(node):
    peer = opened(node)
    many = [f"m{number}" for number in range(1100)]
    accepted, count = write(peer, many, chained=False)
    assert 0 < count.count == len(numbers(accepted.positions)) == 1100 - accepted.full < 1100
    assert node.store.lent_nbytes == 0


def test_another_writer_may_be_first_during_a_remote_write(node):
    peer, other = opened(node), opened(node)
    reply = peer.reply(messages.Write(keys_of(["a"]), PAGE, group=DIGEST))
    commit(other, filled(other, ["a"]))
    payload = memoryview(content("a", PAGE))
    for run in reply.incoming:
        for target in run:
            target[:], payload = payload[: len(target)], payload[len(target) :]
    reply.closing(messages.Checksums(np.array([xxhash.xxh3_64_intdigest(content("a", PAGE))], "<u8").tobytes()))
    assert reply.finish(True).count == 0
    assert node.store.lent_nbytes == 0
    assert read(other, ["a"]) == [True]


def test_a_wrong_remote_write_ends_as_a_failure_and_keeps_nothing(node):
    peer = opened(node)
    for fields in ({"depth": -1}, {"ttl_s": -1.0}, {"priority": 1000}):
        _, second = write(peer, ["a"], **fields)
        assert isinstance(second, messages.Failure)
        assert next(iter(fields)) in second.text
        assert (set(peer.session.lent), node.store.lent_nbytes) == (set(), 0)
    assert read(peer, ["a"]) == [False]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_chunks_stay_while_they_are_sent(node):
    peer = opened(node)
    commit(peer, filled(peer, ["a", "b"]))
    reply = peer.reply(messages.Read(keys_of(["a", "b"]), group=DIGEST))
    assert pins(node) == 2
    assert opened(node).ask(messages.Delete(keys_of(["a", "b"]))).count == 2
    filled(peer, [f"other-{number}" for number in range(10)])
    assert b"".join(reply.outgoing) == content("a", PAGE) + content("b", PAGE)
    reply.finish(False)
    assert pins(node) == 0
    assert read(peer, ["a", "b"]) == [False, False]


def test_pins_end_as_often_as_they_began(node):
    peer = opened(node)
    commit(peer, filled(peer, ["a", "b"]))
    held = peer.ask(messages.Pin(keys_of(["a", "nowhere", "b", "a"])))
    rows = numbers(held.rows)
    assert rows[1] == -1
    assert numbers(held.nbytes, "<u4") == [PAGE, 0, PAGE, PAGE]
    for start, name in zip(numbers(held.offsets, "<u8"), ("a", "", "b", "a"), strict=True):
        assert not name or node.store.arena.view[start : start + PAGE] == content(name, PAGE)
    with pytest.raises(UsageError, match="not pinned"):
        opened(node).ask(messages.Unpin(held.rows))
    peer.ask(messages.Unpin(held.rows))
    assert pins(node) == 0
    with pytest.raises(UsageError, match="not pinned"):
        peer.ask(messages.Unpin(held.rows))


def test_a_read_that_fails_half_way_leaves_no_pins(node, monkeypatch):
    peer = opened(node)
    commit(peer, filled(peer, ["a"]))
    handler = node.handlers[messages.Read].__self__

    class Broken:
        def promote(self, keys, *, until_s):
            raise OSError("a bug")

    monkeypatch.setattr(handler, "_mover", Broken())
    with pytest.raises(ProtocolError, match="internal error"):
        peer.ask(messages.Read(keys_of(["a", "nowhere"])))
    assert pins(node) == 0


def test_wrong_bytes_are_dropped_when_a_reader_suspects_them(node):
    peer = opened(node)
    commit(peer, filled(peer, ["a", "b"]))
    held = peer.ask(messages.Pin(keys_of(["a"])))
    peer.ask(messages.Unpin(held.rows))
    start = numbers(held.offsets, "<u8")[0]
    node.store.arena.view[start] ^= 1
    assert peer.ask(messages.Suspect(keys_of(["a", "b", "nowhere"]))).count == 1
    assert (read(peer, ["a", "b"]), pins(node)) == ([False, True], 0)


# -- recorded requests ------------------------------------------------------------------------------------------------


def test_recorded_requests_are_fetched_once_in_order_and_bounded(node, monkeypatch):
    peer = opened(node)
    one, two, empty = (TracedRequest(1.0, 16, keys_of(names)) for names in ("a", "bcd", ""))
    peer.ask(messages.RecordTrace([one]))
    assert peer.ask(messages.FetchTrace(True)).requests == [], "it was not recording"
    for part in (two, one, empty):
        peer.ask(messages.RecordTrace([part]))
    assert peer.ask(messages.FetchTrace(True)).requests == [two, one, empty]
    monkeypatch.setattr(admin, "MAX_TRACE_NBYTES", 2 * admin.REQUEST_NBYTES + len(two.keys) + len(one.keys))
    for part in (two, two, one, empty):
        peer.ask(messages.RecordTrace([part]))
    assert peer.ask(messages.FetchTrace(False)).requests == [two, one]
    peer.ask(messages.RecordTrace([one]))
    assert peer.ask(messages.FetchTrace(False)).requests == []


def test_a_full_buffer_of_the_shortest_requests_fits_into_one_message(node):
    peer = opened(node)
    peer.ask(messages.FetchTrace(True))
    most = admin.MAX_TRACE_NBYTES // admin.REQUEST_NBYTES
    peer.ask(messages.RecordTrace([TracedRequest(1e9, 1 << 20, b"")] * most))
    found = peer.ask(messages.FetchTrace(False))
    assert len(found.requests) == most
    assert len(codec.encode(found, 0, 0)) < admin.MAX_TRACE_NBYTES


# -- errors -----------------------------------------------------------------------------------------------------------


def test_bugs_are_logged_a_few_times_a_minute_and_counted_each_time(node, caplog, monkeypatch):
    peer = opened(node)
    for kind in (messages.Read, messages.Pin):
        monkeypatch.setitem(node.handlers, kind, lambda request, session: 1 // 0)
    for _ in range(50):
        for request in (messages.Read(b""), messages.Pin(b"")):
            with pytest.raises(ProtocolError, match="internal error"):
                peer.ask(request)
    assert caplog.text.count("bug while serving") == MAX_LOG_LINES
    assert node.stats()["errors"] == {"Read": 50, "Pin": 50}


def test_answers_are_no_requests(node):
    with pytest.raises(UsageError, match="Done is not a request"):
        opened(node).ask(messages.Done())


def test_the_secret_goes_to_local_processes_only():
    node = make_node(secret=b"s" * 32)
    node.start()
    try:
        assert Peer(node, local=True).ask(messages.Attach()).secret == b"s" * 32
        assert Peer(node, local=False).ask(messages.Attach()).secret == b""
        with pytest.raises(UsageError, match="this host"):
            Peer(node, local=False).ask(messages.FetchTrace(True))
    finally:
        node.stop(unlink=True)


def finish(reply: Reply, complete: bool) -> None:
    if complete and reply.closing is not None:
        reply.closing(messages.Checksums(bytes(8 * (len(reply.answer.positions) // 4))))
    reply.finish(complete)


def test_random_requests_leave_the_node_whole(node, rng: random.Random, caplog):
    """Send random requests of every kind. Each is answered, no lease is lost, and no bug is logged."""
    peer = opened(node)
    kinds = [
        messages.Lend, messages.Commit, messages.GiveBack, messages.Write, messages.Read, messages.Pin, messages.Unpin,
        messages.Promote, messages.Delete, messages.Suspect, messages.Hint, messages.Locate, messages.Announce,
        messages.Why, messages.Report, messages.Adopt, messages.OpenNamespace, messages.RecordTrace,
    ]  # fmt: skip

    def value(name: str, kind: str):
        if name == "runs":
            fields = {key: value(key, text) for key, text in annotations(messages.Run)}
            return tuple(messages.Run(**fields) for _ in range(rng.randrange(3)))
        if name == "requests":
            return [TracedRequest(rng.random(), 16, rng.randbytes(rng.randrange(40))) for _ in range(rng.randrange(3))]
        if "bytes" in kind:
            some = [b"", rng.randbytes(rng.randrange(40)), keys_of(["a"]), keys_of(["a", "b"])]
            some += [np.array([rng.randrange(-2, 70)], "<i4").tobytes(), bytes(8), b'{"model": "x"}']
            return rng.choice(some)
        if "bool" in kind:
            return rng.random() < 0.5
        if "int" in kind and "tuple" not in kind and "dict" not in kind:
            return rng.choice([0, 1, 2, -1, PAGE, PAGE, 1 << 40, 70])
        if "float" in kind:
            return rng.choice([0.0, 1.0, -1.0, float("nan"), 0.001])
        return {"dict": {"why": 3}, "tuple": (1, 2)}.get(kind.split("[")[0], "node-x")

    def annotations(kind):
        return [(each, str(kind.__annotations__[each])) for each in kind.__annotations__]

    for _ in range(3000):
        kind = rng.choice(kinds)
        fields = {name: value(name, text) for name, text in annotations(kind)}
        retentions = [None, (value("", "float"), value("", "int"))]
        fields = {name: rng.choice(retentions) if name == "retain" else each for name, each in fields.items()}
        if kind is messages.Promote:
            fields["timeout_s"] = 0.0
        if kind is messages.Lend:
            del fields["until_s"]
        request = kind(**fields, group=rng.choice([DIGEST, DIGEST, b"", b"x"]))
        reply = node.answer(request, peer.session)
        finish(reply, rng.random() < 0.5)
        assert "bug" not in caplog.text, request
    peer.close()
    assert (pins(node), node.store.lent_nbytes) == (0, 0)
