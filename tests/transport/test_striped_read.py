"""Reads over several NICs: loopback addresses, each with a server. What a rail does not bring, the others do."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import raykv
from raykv.config import ClientConfig, NodeConfig
from raykv.embedded import EmbeddedCluster
from raykv.errors import ConfigError, PeerUnavailable, UsageError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.placement import Member
from raykv.transport import striped_read
from raykv.transport.base import Reply
from raykv.transport.bulk_read import ReadProgress, ReadRun
from raykv.transport.data_path import LinkPath, PathEnvironment
from raykv.transport.nics import nic_addresses
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import SocketServer
from raykv.transport.tls import Tls
from tests.support.certificates import Authority
from tests.support.nodes import wait_until
from tests.support.transports import SECRET, Holder, soon

MIB = 1 << 20
COUNT = 24
CONTENT = {number: np.random.default_rng(number).bytes(MIB) for number in range(COUNT)}


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


class Server(SocketServer):
    """A server that remembers from which addresses it was connected to."""

    def _start_thread(self, connection: socket.socket, peer: object) -> bool:
        assert isinstance(peer, tuple)
        self.__dict__.setdefault("peers", []).append(peer[0])
        return super()._start_thread(connection, peer)


class Host:
    """A node with several NICs, and a reader of it.

    Attributes:
        holders: What answers on each NIC. All have the same chunks.
        member: The node as readers see it. "tcp" is its first NIC.
        last: The outcome of the last read.
    """

    def __init__(
        self, nics: int, *, sources: tuple[str, ...] | None = (), main: str = "", tls: Tls | None = None
    ) -> None:
        self._tls = tls
        chunks = {key(number): content for number, content in CONTENT.items()}
        self.holders = [Holder(chunks) for _ in range(nics)]
        self.addresses = [f"127.0.0.{number + 2}" for number in range(nics)]
        self.servers: list[Server | None] = []
        self.last: ReadRun | None = None
        for number, address in enumerate(self.addresses):
            self.servers.append(self._serve(f"{address}:0", self.holders[number]))
        addresses = [server.address for server in self.servers if server]
        endpoints = {"tcp": main or addresses[0]} | {f"nic{n}": each for n, each in enumerate(addresses)}
        self.member = Member("n", "there", endpoints, 1.0, 1)
        self.pool = ConnectionPool(SECRET, breaker_s=60.0, max_idle=4, tls=tls)
        self.path = LinkPath(PathEnvironment(self.pool, "here", sources=sources))

    def _serve(self, address: str, holder: Holder) -> Server:
        server = Server(holder, address, SECRET, io_timeout_s=5.0, max_connections=64, tls=self._tls)
        server.serve()
        return server

    def stop(self, nic: int) -> None:
        """Nothing listens on this NIC any more, and its connections are reset."""
        server, self.servers[nic] = self.servers[nic], None
        assert server is not None
        server.close()

    def start(self, nic: int) -> None:
        self.servers[nic] = self._serve(self.member.nics[nic], self.holders[nic])

    def read(self, numbers: list[int] | None = None, *, timeout_s: float = 10.0, locate: bool = False) -> ReadRun:
        """Read chunks. Whatever arrived has the right bytes. Nobody refers to the buffers after the read."""
        numbers = list(range(COUNT)) if numbers is None else numbers
        into = [bytearray(MIB) for _ in numbers]
        keys = chunk_keys.from_bytes(b"".join(map(key, numbers)))
        progress = ReadProgress(keys, [[memoryview(each)] for each in into], [MIB] * len(numbers))
        run = self.last = ReadRun(progress, "n", list(range(len(numbers))), locate=locate)
        try:
            self.path.read(self.member, run, deadline_s=soon(timeout_s))
        finally:
            assert len(run.arrived) == len(set(run.arrived))
            for place in run.arrived:
                assert into[place] == CONTENT[numbers[place]]
            progress.targets.clear()
            for buffer in into:  # raises an error if anything still refers to the buffer
                buffer.append(1)
        return run

    def whole(self, numbers: list[int] | None = None, **options: float) -> None:
        run = self.read(numbers, **options)
        assert run.missing == []

    @property
    def counts(self) -> list[int]:
        """How many chunks each NIC was asked for so far."""
        return [sum(map(len, holder.reads)) for holder in self.holders]

    @property
    def in_use(self) -> list[bool]:
        return [rail["in_use"] for rail in self.path.stats()["rails"]["n"].values()]

    def close(self) -> None:
        self.path.close()
        self.pool.close()
        for server in self.servers:
            if server is not None:
                server.close()


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    with contextlib.ExitStack() as stack:

        def make(nics: int, **options: object) -> Host:
            made = Host(nics, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped_read, "SILENT_S", 0.15)
    monkeypatch.setattr(striped_read, "SMALL_S", 0.15)


def silent_after(holder: Holder, nbytes: int) -> Callable[[], None]:
    """Let a NIC go down: of the next answers only `nbytes` bytes arrive. Returns a function that mends it."""
    holder.cut_after = nbytes

    def mend() -> None:
        holder.cut_after = None

    return mend


def rail_threads() -> int:
    return sum("raykv-rail" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("nics", [2, 3, 4])
def test_a_large_run_is_spread_over_all_nics(host, nics):
    there = host(nics)
    run = there.read()
    assert sorted(run.arrived) == list(range(COUNT))
    assert run.path == "tcp"
    assert there.counts == [COUNT // nics] * nics
    there.whole()
    assert sum(there.counts) == 2 * COUNT
    assert there.in_use == [True] * nics
    rates = [rail["nbytes_per_s"] for rail in there.path.stats()["rails"]["n"].values()]
    assert min(rates) > 0
    assert list(there.path.stats()["rails"]["n"]) == list(there.member.nics)


def test_a_small_run_takes_the_first_nic_and_no_thread(host):
    there = host(3)
    before = rail_threads()
    there.whole([0, 1, 2])
    assert there.counts == [3, 0, 0]
    assert rail_threads() == before


def test_with_one_address_there_are_no_rails(host):
    there = host(1)
    before = rail_threads()
    there.whole()
    assert there.path.stats() == {}
    assert rail_threads() == before


def test_a_reader_that_is_told_so_uses_one_nic_only(host):
    there = host(3, sources=None)
    there.whole()
    assert there.counts == [COUNT, 0, 0]
    assert there.path.stats() == {}


def test_each_rail_has_its_own_source_address(host):
    there = host(2, sources=("127.0.1.1", "127.0.1.2"))
    there.whole()
    assert [server.peers for server in there.servers] == [["127.0.1.1"], ["127.0.1.2"]]
    there.whole()
    assert [server.peers for server in there.servers] == [["127.0.1.1"], ["127.0.1.2"]]  # the links are used again
    first, second = there.member.nics
    assert list(there.path.stats()["rails"]["n"]) == [f"127.0.1.1 -> {first}", f"127.0.1.2 -> {second}"]


def test_several_sources_to_a_node_with_one_nic(host):
    there = host(1, sources=("127.0.1.1", "127.0.1.2"))
    there.whole()
    assert sorted(there.servers[0].peers) == ["127.0.1.1", "127.0.1.2"]
    assert there.in_use == [True, True]


def test_a_nic_that_refuses_connections_costs_no_chunk(host):
    there = host(3)
    there.stop(1)
    there.whole()
    assert there.in_use == [True, False, True]
    assert there.pool.tripped() == {}
    before = there.counts
    there.whole()
    assert there.counts[1] == before[1] == 0


@pytest.mark.parametrize("nic", [0, 1])
def test_a_connection_that_breaks_in_the_middle_costs_no_chunk(host, nic):
    there = host(2)
    answer = there.holders[nic].answer

    def break_off(request: messages.Message, session: object) -> Reply:
        if len(there.holders[nic].reads) == 1:
            raise PeerUnavailable("broken off by the test")
        return answer(request, session)

    there.holders[nic].answer = break_off
    there.whole()
    assert there.in_use == [nic != 0, nic != 1]
    assert there.counts[1 - nic] == COUNT - 8  # one part had arrived


@pytest.mark.parametrize("nic", [0, 1, 2])
def test_a_nic_that_falls_silent_in_the_middle_costs_no_chunk(host, impatient, nic):
    """No error tells of a cable that was pulled: only the bytes stay away."""
    there = host(3)
    silent_after(there.holders[nic], 3 * MIB + 5)
    began_s = time.monotonic()
    there.whole()
    assert time.monotonic() - began_s < 5.0  # the deadline is in ten seconds
    assert there.in_use == [number != nic for number in range(3)]
    assert there.pool.tripped() == {}


def test_silent_nics_are_found_out_over_tls_too(host, impatient, tmp_path):
    there = host(2, tls=Tls(Authority(tmp_path / "ca").issue("node")))
    silent_after(there.holders[1], MIB + 5)
    there.whole()
    assert there.in_use == [True, False]


def test_an_interrupt_ends_all_shares(host):
    """After the call nobody writes to the buffers: `Host.read` checks that nobody refers to them."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    there = host(2)
    for holder in there.holders:
        holder.cut_after = MIB + 5
    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began_s = time.monotonic()
    try:
        with pytest.raises(Interrupt):
            there.read(timeout_s=20.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
    assert time.monotonic() - began_s < 10.0
    for holder in there.holders:
        holder.cut_after = None
    there.whole()


def test_with_little_time_a_silent_nic_is_found_out_too(host):
    there = host(2)
    silent_after(there.holders[1], 0)
    there.whole(timeout_s=1.0)
    assert there.in_use == [True, False]


def test_a_small_run_leaves_a_silent_nic(host, impatient):
    there = host(2)
    silent_after(there.holders[0], 5)
    there.whole([0, 1])
    assert there.counts == [2, 2]
    there.whole([0, 1])
    assert there.counts == [2, 4]


def test_a_large_chunk_leaves_a_silent_nic(host, impatient, monkeypatch):
    monkeypatch.setattr(striped_read, "STRIPED_NBYTES", 0)  # a single chunk has 1 MiB here
    there = host(2)
    silent_after(there.holders[0], 5)
    there.whole([0])
    assert there.in_use == [False, True]


def test_a_rail_is_back_after_its_pause(host, monkeypatch):
    monkeypatch.setattr(striped_read, "PAUSE_S", 0.2)
    there = host(2)
    there.stop(1)
    there.whole()
    assert there.in_use == [True, False]
    there.start(1)

    def is_back() -> bool:
        there.whole()
        return there.in_use == [True, True]

    wait_until(is_back)
    probed = there.counts[1]

    def carries_more() -> bool:  # not at once if the probe, which had to connect, was slow
        there.whole()
        return there.counts[1] > probed + 1

    wait_until(carries_more)


def test_a_node_that_takes_its_time_is_not_blamed_on_its_nics(host, monkeypatch):
    """A node that promotes chunks from a slow tier sends nothing over any rail."""
    monkeypatch.setattr(striped_read, "SILENT_S", 0.4)
    there = host(2)
    for holder in there.holders:

        def slow(request: messages.Message, session: object, answer=holder.answer) -> Reply:
            time.sleep(1.0)
            return answer(request, session)

        holder.answer = slow
    there.whole()
    assert there.in_use == [True, True]
    assert sum(there.counts) == COUNT


def test_a_node_that_is_down_is_left_alone_as_with_one_nic(host):
    there = host(3)
    for nic in range(3):
        there.stop(nic)
    with pytest.raises(PeerUnavailable):
        there.read()
    assert list(there.pool.tripped()) == [there.member.address]
    assert there.pool.failures == 1
    with pytest.raises(PeerUnavailable, match="left alone"):
        there.read()


def test_a_node_that_hangs_is_left_alone_as_with_one_nic(host, impatient):
    there = host(2)
    for holder in there.holders:
        holder.cut_after = 0
    began_s = time.monotonic()
    with pytest.raises(PeerUnavailable):
        there.read(timeout_s=0.5)
    assert time.monotonic() - began_s < 1.0
    assert list(there.pool.tripped()) == [there.member.address]


def test_what_arrived_before_the_deadline_is_a_hit(host):
    there = host(2)
    for holder in there.holders:
        holder.cut_after = 2 * MIB + 7
    with pytest.raises(PeerUnavailable):
        there.read(timeout_s=0.5)
    assert there.last is not None
    assert sorted(there.last.arrived) == [0, 1, 2, 3]  # the first two chunks of each share


def test_without_a_working_nic_the_main_address_is_used(host):
    main = host(1)
    there = host(2, main=main.member.address)
    there.whole()
    assert main.counts == [0]  # the main address is not one of the NICs
    for nic in range(2):
        there.stop(nic)
    there.whole()
    assert main.counts == [COUNT]
    assert there.pool.tripped() == {}


def test_each_chunk_has_its_outcome(host):
    there = host(3)
    for holder in there.holders:
        holder.chunks = dict(holder.chunks)
        for number in range(0, COUNT, 3):
            del holder.chunks[key(number)]
        holder.chunks[key(1)] = b"short"
        holder.sums[key(2)] = 1
    run = there.read()
    assert sorted(run.gone) == list(range(0, COUNT, 3))
    assert run.other_size == [1]
    assert run.corrupt == [2]
    assert sorted(run.arrived) == [n for n in range(4, COUNT) if n % 3]
    assert [each for holder in there.holders for each in holder.suspects] == [key(2)]
    assert there.in_use == [True] * 3


def test_an_owner_names_holders_over_each_rail(host):
    there = host(2)
    for holder in there.holders:
        holder.chunks = {}
        holder.holders = {key(number): ("other",) for number in range(COUNT)}
    run = there.read(locate=True)
    assert run.arrived == []
    assert run.named
    assert set(run.named.values()) == {("other",)}


def test_a_refusal_is_not_blamed_on_a_rail(host):
    there = host(2)
    for holder in there.holders:
        holder.answer = lambda request, session: Reply(messages.Failure("UsageError", "no"))
    with pytest.raises(UsageError):
        there.read()
    assert there.in_use == [True, True]
    assert there.pool.tripped() == {}


def test_rails_that_fail_by_chance_cost_no_chunk(host, seed, monkeypatch):
    """As long as one NIC of three works, every chunk arrives."""
    monkeypatch.setattr(striped_read, "SILENT_S", 0.1)
    monkeypatch.setattr(striped_read, "SMALL_S", 0.1)
    monkeypatch.setattr(striped_read, "PAUSE_S", 0.05)
    rng = random.Random(seed)
    there, works = host(3), rng.randrange(3)
    there.member.endpoints["tcp"] = there.member.nics[works]
    for _ in range(25):
        for nic, holder in enumerate(there.holders):
            holder.cut_after = None if nic == works or rng.random() < 0.5 else rng.randrange(10 * MIB)
        numbers = rng.sample(range(COUNT), rng.choice([1, 3, 6, 12, COUNT]))
        there.whole(sorted(numbers), timeout_s=20.0)
    assert there.pool.tripped() == {}


def test_many_threads_share_the_rails(host):
    there = host(3)
    failed = []

    def read() -> None:
        try:
            for _ in range(5):
                there.whole()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(there.counts) >= 6 * 5 * COUNT


def test_a_forked_child_reads_over_links_of_its_own(host):
    there = host(2)
    there.whole()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            there.whole()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    there.whole()
    assert there.in_use == [True, True]


def test_a_node_that_restarts_begins_with_all_rails(host):
    there = host(2)
    there.stop(1)
    there.whole()
    assert there.in_use == [True, False]
    there.start(1)
    there.member = Member("n", "there", there.member.endpoints, 1.0, 2)
    there.whole()
    assert there.in_use == [True, True]
    there.path.retain([])
    assert there.path.stats() == {}


# -- configuration, and real nodes ------------------------------------------------------------------------------------


def test_names_of_nics():
    assert nic_addresses(["lo", "10.1.2.3"]) == ["127.0.0.1", "10.1.2.3"]
    with pytest.raises(ConfigError, match=r"field 'nics': no interface 'eth77' here; there are: .*lo"):
        nic_addresses(["eth77"])
    for value in ("", "eth0,", "eth 0", ",".join(["eth0"] * 17)):
        with pytest.raises(ConfigError, match="nics"):
            ClientConfig.load({"nics": value})
    assert ClientConfig.load({"nics": "eth0,eth1.7,10.0.0.1"}).nics == "eth0,eth1.7,10.0.0.1"


@contextlib.contextmanager
def cluster(nics: str) -> Iterator[EmbeddedCluster]:
    fields = {"cluster": "nics", "node_id": "node", "heartbeat_s": 0.05, "nics": nics}
    storage = {"arena_nbytes": "64 MiB", "extent_nbytes": "4 MiB", "shm_dir": None}
    config = NodeConfig.load({**fields, "storage": storage})
    made = EmbeddedCluster(config, separate_hosts=True, member_timeout_s=5.0)
    try:
        for _ in range(2):
            made.add()
        made.settle()
        yield made
    finally:
        made.close()


def test_nodes_are_read_over_all_their_nics():
    namespace = raykv.Namespace(model="m")
    with cluster("lo,127.0.0.2,127.0.0.3") as running:
        writer, reader = (running.client(namespace, node=node) for node in range(2))
        member = running.nodes[0].member
        port = member.address.rpartition(":")[2]
        assert member.nics == tuple(f"127.0.0.{number}:{port}" for number in (1, 2, 3))
        names = [str(number) for number in range(COUNT)]
        assert writer.put(names, list(CONTENT.values()), chained=False).stored == COUNT
        running.settle()
        into = [bytearray(MIB) for _ in names]
        got = reader.get(names, into)
        assert all(got.hits)
        assert got.nbytes_by_path == {"tcp": COUNT * MIB}
        assert into == list(CONTENT.values())
        rails = reader.stats()["data_paths"]["tcp"]["rails"]
        assert list(rails["node-0"]) == list(member.nics)
        alone = running.client(namespace, node=1, nics="off")
        assert all(alone.get(names, into).hits)
        assert alone.stats()["data_paths"]["tcp"] == {}


def test_a_nic_that_cannot_be_listened_on_is_left_out(caplog):
    with cluster("127.0.0.1,203.0.113.77,127.0.0.3") as running:
        member = running.nodes[0].member
        port = member.address.rpartition(":")[2]
        assert member.nics == (member.address, "", f"127.0.0.3:{port}")
        assert "203.0.113.77" in caplog.text


def test_a_port_that_is_in_use_on_a_nic_costs_only_the_port():
    with socket.create_server(("127.0.0.9", 0)) as other:
        port = other.getsockname()[1]
        fields = {"cluster": "nics", "node_id": "node", "bind": f"127.0.0.1:{port}", "nics": "127.0.0.1,127.0.0.9"}
        storage = {"arena_nbytes": "8 MiB", "extent_nbytes": "4 MiB", "shm_dir": None}
        running = EmbeddedCluster(
            NodeConfig.load({**fields, "storage": storage}), separate_hosts=True, member_timeout_s=5.0
        )
        try:
            running.add()
            first, second = running.nodes[0].member.nics
            assert first == f"127.0.0.1:{port}"
            assert second.startswith("127.0.0.9:")
            assert second != f"127.0.0.9:{port}"
        finally:
            running.close()
