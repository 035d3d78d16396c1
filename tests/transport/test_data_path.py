"""Reads over data paths. Each chunk of a run has one outcome, and chunks that arrived have the right bytes."""

import time
from itertools import chain

import numpy as np
import pytest

from raykv.errors import PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.memory.copying import checksum_of
from raykv.protocol import messages
from raykv.protocol.placement import Member
from raykv.transport import bulk_read, bulk_write, stream
from raykv.transport.base import Reply
from raykv.transport.bulk_read import BulkRead, ReadProgress, ReadRun
from raykv.transport.data_path import DataPath, DataPaths, LinkPath, PathEnvironment, ShmPath
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import SocketServer
from tests.support.transports import SECRET, Holder, soon

NBYTES = 5000


def content(number: int, nbytes: int = NBYTES) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def member(**endpoints: str) -> Member:
    return Member("n", "host", endpoints, 1.0, 1)


@pytest.fixture
def holder():
    return Holder({key(number): content(number) for number in range(60)})


@pytest.fixture
def reached(holder):
    """Return a connection pool, and the holder as a member of the cluster."""
    server = SocketServer(holder, "127.0.0.1:0", SECRET, io_timeout_s=1.0, max_connections=8)
    server.serve()
    pool = ConnectionPool(SECRET, breaker_s=0.1, max_idle=2)
    yield pool, member(tcp=server.address)
    pool.close()
    server.close()


@pytest.fixture
def small_parts(loops, monkeypatch):
    """Limit a request to three keys, so that few chunks need many requests. `loops` runs each test twice."""
    monkeypatch.setattr(bulk_read, "PART_KEYS", 3)


def progress_of(numbers: list[int], sizes: list[int] | None = None) -> tuple[ReadProgress, list[bytearray]]:
    """Return the progress of a `get` of these keys, and the buffers of the `get`."""
    keys = np.frombuffer(b"".join(map(key, numbers)), np.uint64).reshape(-1, 2)
    into = [bytearray(size) for size in sizes or [NBYTES] * len(numbers)]
    targets = [[memoryview(each)[: len(each) // 3], memoryview(each)[len(each) // 3 :]] for each in into]
    return ReadProgress(keys, targets, list(map(len, into)), group=b"group"), into


def read(reached, numbers, sizes=None, *, locate=False, verify=True) -> tuple[ReadRun, list[bytearray]]:
    pool, there = reached
    progress, into = progress_of(numbers, sizes)
    run = ReadRun(progress, "n", list(range(len(numbers))), locate=locate)
    LinkPath(PathEnvironment(pool, "host", "always" if verify else "never")).read(there, run, deadline_s=soon())
    for place in run.arrived:
        assert bytes(into[place]) == content(numbers[place], len(into[place]))
    outcomes = [run.arrived, run.gone, run.corrupt, run.other_size, [p for p in run.named if p not in run.gone]]
    assert sorted(chain(*outcomes)) == list(range(len(numbers))) or locate
    return run, into


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 50])
def test_parts_and_partial_hits(reached, holder, small_parts, count):
    for number in range(0, count, 3):
        del holder.chunks[key(number)]
    run, _ = read(reached, list(range(count)))
    assert run.arrived == [number for number in range(count) if number % 3]
    assert run.gone == list(range(0, count, 3))
    assert sum(map(len, holder.reads)) == count
    assert max(map(len, holder.reads)) <= 3
    assert holder.groups == {b"group"}
    assert run.path == "tcp"


def test_one_request_for_a_read_that_fits(reached, holder):
    read(reached, list(range(60)))
    assert [len(keys) for keys in holder.reads] == [60]


def test_buffers_of_other_lengths_among_right_ones(reached, small_parts):
    sizes = [NBYTES + (n % 4 == 1) - (n % 4 == 3) * n for n in range(20)]
    sizes[9] = 0
    run, _ = read(reached, list(range(20)), sizes)
    assert run.arrived == list(range(0, 20, 2))
    assert run.other_size == list(range(1, 20, 2))


def test_large_chunks_among_small_ones(reached, holder, loops):
    sizes = [NBYTES, 1 << 20, NBYTES, 300_001, 1 << 20, 1]
    for number, size in enumerate(sizes):
        holder.chunks[key(number)] = content(number, size)
    run, _ = read(reached, list(range(6)), sizes)
    assert run.arrived == list(range(6))


@pytest.mark.parametrize("verify", [True, False])
def test_corrupt_chunks_do_not_count_and_their_holder_hears_of_it(reached, holder, small_parts, verify):
    for number in (0, 4, 19):
        holder.sums[key(number)] = 1
    run, _ = read(reached, list(range(20)), verify=verify)
    assert run.corrupt == ([0, 4, 19] if verify else [])
    assert holder.suspects == (list(map(key, [0, 4, 19])) if verify else [])
    assert len(run.arrived) + len(run.corrupt) == 20


@pytest.mark.parametrize("count", [1, 2, 30])
def test_an_owner_names_the_holders_of_the_chunks_that_it_lacks(reached, holder, small_parts, count):
    for number in range(count):
        del holder.chunks[key(number)]
        holder.holders[key(number)] = ("other", "n", "third") if number == 0 else ("other",)
    run, _ = read(reached, list(range(count)), locate=True)
    answered = min(count, bulk_read.PARTS_AHEAD * bulk_read.PART_KEYS)  # the caller looks up the other keys
    assert run.named == {0: ("other", "third")} | dict.fromkeys(range(1, answered), ("other",))
    assert run.gone == [0]  # because the owner names itself as a holder of this chunk
    assert run.missing == list(range(count))
    assert len(holder.reads) <= bulk_read.PARTS_AHEAD


def test_an_owner_that_knows_nobody_is_asked_for_everything(reached, holder, small_parts):
    for number in range(0, 30, 2):
        del holder.chunks[key(number)]
    run, _ = read(reached, list(range(30)), locate=True)
    assert run.arrived == list(range(1, 30, 2))
    assert run.named == dict.fromkeys(range(0, 30, 2), ())
    assert run.missing == list(range(0, 30, 2))
    assert run.gone == []


def test_an_answer_of_the_wrong_shape(reached, holder):
    answer = holder.answer

    def short(request: messages.Message, session: object):
        reply = answer(request, session)
        reply.answer.nbytes = reply.answer.nbytes[:-4]
        return reply

    holder.answer = short
    with pytest.raises(ProtocolError):
        read(reached, [1, 2, 3])


def test_a_holder_that_stalls_costs_the_rest_and_not_what_has_arrived(holder, loops, monkeypatch):
    server = SocketServer(holder, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    server.serve()
    pool = ConnectionPool(SECRET, breaker_s=0.1, max_idle=2)
    holder.cut_after = NBYTES + 1000
    progress, into = progress_of([0, 1, 2, 3])
    run = ReadRun(progress, "n", [0, 1, 2, 3])
    began_s = time.monotonic()
    with pytest.raises(PeerUnavailable):
        LinkPath(PathEnvironment(pool, "host")).read(member(tcp=server.address), run, deadline_s=soon(0.3))
    assert 0.25 < time.monotonic() - began_s < 0.6
    assert run.arrived == [0]
    assert into[0] == content(0)
    assert run.missing == [1, 2, 3]
    del progress, run
    for buffer in into:  # raises an error if anything still refers to the buffer
        buffer.append(1)
    pool.close()
    server.close()


def test_a_read_goes_on_over_a_new_link_where_it_was_broken_off(holder, small_parts, monkeypatch):
    """The idle link breaks in the middle of the read. Chunks that have arrived are not read again."""
    server = SocketServer(holder, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    server.serve()
    pool = ConnectionPool(SECRET, breaker_s=0.1, max_idle=2)
    reached = pool, member(tcp=server.address)
    read(reached, [50])
    answer = holder.answer

    def break_off(request: messages.Message, session: object):
        if len(holder.reads) == 3:
            holder.answer = answer
            raise PeerUnavailable("broken off by the test")
        return answer(request, session)

    holder.answer = break_off
    run, _ = read(reached, list(range(20)))
    assert sorted(run.arrived) == list(range(20))
    assert holder.reads[3][0] in (key(3), key(6))  # one or two parts had arrived
    pool.close()
    server.close()


@pytest.mark.slow
def test_a_holder_that_sends_too_slowly_is_left_at_the_deadline(holder):
    """Bytes keep arriving, so no single wait is long."""
    reply = holder.answer(messages.Read(key(1)), None)
    server = SocketServer(holder, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    reply.outgoing = [memoryview(content(1))[at : at + 1] for at in range(NBYTES)]

    class Slow(Holder):
        def answer(self, request: messages.Message, session: object):
            return reply

    server._service = Slow({})
    server.serve()
    send_some = stream.Stream._send_some

    def trickle(self, pieces, deadline_s):
        for piece in pieces:
            send_some(self, [piece], deadline_s)
            if len(piece) == 1:
                time.sleep(0.002)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.Stream, "_send_some", trickle)
        link = Link.connect(server.address, SECRET, deadline_s=soon())
        progress, _ = progress_of([1])
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable):
            BulkRead(ReadRun(progress, "n", [0]), verify=True).read(link, deadline_s=soon(0.2))
        assert time.monotonic() - began_s < 0.5
        server.close()


# -- the choice of a path ---------------------------------------------------------------------------------------------


class Toy(DataPath):
    """A small data path from outside the package. It reads each chunk as zeros."""

    name = "toy"

    def can_reach(self, there, *, deadline_s):
        return "toy" in there.endpoints

    def read(self, there, run, *, deadline_s):
        for place in run.places:
            for piece in run.progress.targets[place]:
                piece[:] = bytes(len(piece))
        run.arrived, run.path = list(run.places), "toy"


def test_the_first_path_that_leads_to_a_member_is_chosen():
    pool = ConnectionPool(SECRET, breaker_s=0.1, max_idle=2)
    toy, shm, tcp = Toy(), ShmPath(PathEnvironment(pool, "host")), LinkPath(PathEnvironment(pool, "host"))
    paths = DataPaths([toy, shm, tcp])
    assert paths.choose(member(toy="x", tcp="y:1"), deadline_s=soon()) is toy
    assert paths.choose(member(tcp="y:1"), deadline_s=soon()) is tcp  # without a Unix socket, shm cannot attach
    with pytest.raises(TransientError, match=r"toy, shm, tcp.*'n'.*carrier-pigeon"):
        paths.choose(member(**{"carrier-pigeon": "z"}), deadline_s=soon())
    progress, _ = progress_of([1, 2])
    run = ReadRun(progress, "n", [0, 1])
    paths.choose(member(toy="x"), deadline_s=soon()).read(member(toy="x"), run, deadline_s=soon())
    progress.record(run.arrived, run.holder, run.path)
    assert progress.result().chunks_by_source == {("n", "toy"): 2}
    paths.retain(())
    paths.close()


def test_a_node_of_this_host_whose_files_cannot_be_mapped_is_read_over_tcp(holder):
    answers: list[messages.Answer] = [messages.Attached("n", "host", "/nowhere/table", "/nowhere/arena")]
    holder.answer = lambda request, session: Reply(answers.pop())
    address = f"unix:@raykv-test-{time.monotonic_ns()}"
    server = SocketServer(holder, address, b"", io_timeout_s=5.0, max_connections=8)
    server.serve()
    pool = ConnectionPool(SECRET, breaker_s=0.1, max_idle=2)
    shm = ShmPath(PathEnvironment(pool, "host"))
    there = member(unix=address, tcp="y:1")
    assert not shm.can_reach(there, deadline_s=soon())
    assert not shm.can_reach(there, deadline_s=soon())
    assert len(answers) == 0  # the node was asked once
    with pytest.raises(RayKVError):
        shm.read(there, ReadRun(progress_of([1])[0], "n", [0]), deadline_s=soon())
    assert not shm.can_reach(Member("n", "other host", {"unix": address}, 1.0, 1), deadline_s=soon())
    pool.close()
    server.close()


# -- progress, parts, payloads ----------------------------------------------------------------------------------------


def test_progress_counts_each_chunk_once():
    progress, _ = progress_of([5, 6, 7, 8], [10, 20, 30, 40])
    assert progress.missing() == [0, 1, 2, 3]
    progress.record([], "a", "tcp")
    progress.record([1, 3], "a", "tcp")
    assert progress.missing() == [0, 2]
    progress.record([0, 2], "b", "shm")
    assert progress.missing() == []
    assert progress.result().nbytes_by_path == {"tcp": 60, "shm": 40}
    assert progress.result().chunks_by_source == {("a", "tcp"): 2, ("b", "shm"): 2}
    assert progress.raw_keys([1, 2]) == key(6) + key(7)
    assert progress.raw_keys([0, 3]) == key(5) + key(8)
    assert progress.raw_keys([]) == b""


def test_parts_hold_all_places_in_order_and_keep_to_the_limits(rng):
    for _ in range(100):
        sizes = [rng.randrange(1, 100) for _ in range(rng.randrange(30))]
        progress, _ = progress_of(list(range(len(sizes))), sizes) if sizes else (progress_of([1])[0], [])
        places = sorted(rng.sample(range(len(sizes)), rng.randrange(len(sizes) + 1)))
        parts = progress.cut(places, nbytes=150, keys=5)
        assert list(chain(*parts)) == places
        for part in parts:
            assert 1 <= len(part) <= 5
            assert len(part) == 1 or sum(progress.sizes[place] for place in part) <= 150


def test_the_payload_of_a_write():
    values = [[memoryview(content(n))[:7], memoryview(content(n))[7:]] for n in range(5)]
    checksums = bytearray()
    sent = b"".join(bytes(piece) for run in bulk_write.hashed(values, [0, 2, 4], checksums) for piece in run)
    assert sent == content(0) + content(2) + content(4)
    assert checksums == np.array([checksum_of(values[n]) for n in (0, 2, 4)], "<u8").tobytes()


def test_a_drained_payload_takes_no_memory_of_its_size():
    views = bulk_read.drain(5 * bulk_read.SCRAP_NBYTES + 3)
    assert sum(map(len, views)) == 5 * bulk_read.SCRAP_NBYTES + 3
    assert len({id(view.obj) for view in views}) == 1
