"""The contract of links and servers: one set of tests for each kind of address."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from raykv.errors import CapacityError, PeerUnavailable, ProtocolError, UsageError
from raykv.protocol import messages
from raykv.transport.base import MAX_POSTED, Runs
from raykv.transport.link import Link
from raykv.transport.server import SocketServer
from raykv.transport.tls import Tls
from tests.support.transports import SECRET, Warehouse, soon


class LinkContract:
    """The tests. Subclasses give the address of the server."""

    local: bool
    tls: Tls | None = None
    stock = bytes(range(256)) * 9001  # 2.3 MB: more than any socket buffer

    def address(self, tmp: str) -> str:
        raise NotImplementedError

    def serve(self, service: Warehouse, tmp: str) -> tuple[Callable[[], Link], Callable[[], None]]:
        """Start a server. Returns a function that connects to it, and a function that stops it."""
        server = SocketServer(service, self.address(tmp), SECRET, io_timeout_s=5.0, max_connections=64, tls=self.tls)
        server.serve()
        return lambda: Link.connect(server.address, SECRET, deadline_s=soon(), tls=self.tls), server.close

    @pytest.fixture
    def service(self):
        return Warehouse(self.stock)

    @pytest.fixture
    def connect(self, service, shm_dir):
        connect, stop = self.serve(service, str(shm_dir))
        links: list[Link] = []

        def connect_and_remember() -> Link:
            links.append(connect())
            return links[-1]

        yield connect_and_remember
        for link in links:
            link.close()
        stop()
        assert all(session.closed.wait(5.0) for session in service.sessions)

    def test_calls_in_a_row(self, connect, service):
        link = connect()
        for _ in range(3):
            assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
            assert link.call(messages.Attach(), deadline_s=soon()) == messages.Stats(b"Attach")
        assert len(service.sessions) == 1
        assert service.sessions[0].local is self.local

    def test_answers_tell_the_epoch(self, connect):
        link = connect()
        link.call(messages.GetStats(), deadline_s=soon())
        assert link.epoch == 7

    def test_a_failure_is_raised_and_the_link_lives_on(self, connect):
        link = connect()
        with pytest.raises(UsageError, match="not for deletion"):
            link.call(messages.Delete(b""), deadline_s=soon())
        with pytest.raises(CapacityError, match="full"):
            link.call(messages.Commit(()), deadline_s=soon())
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")

    @pytest.mark.parametrize("cuts", [[], [1], [5, 5, 100_000], [1_000_000, 2_000_000]])
    def test_fetched_bytes_land_in_the_callers_buffers(self, connect, service, cuts):
        buffer = bytearray(len(self.stock))
        edges = [0, *cuts, len(buffer)]
        pieces = [memoryview(buffer)[a:b] for a, b in pairwise(edges)]
        seen: list[messages.Answer] = []

        def place(answer: messages.Answer) -> Runs:
            seen.append(answer)
            return [pieces]

        link = connect()
        for _ in range(2):
            answer = link.call(messages.Read(b""), place, deadline_s=soon())
            assert buffer == self.stock
            assert answer == seen.pop() == messages.Reading(b"n", b"c")
            buffer[:] = bytes(len(buffer))
        link.call(messages.GetStats(), deadline_s=soon())
        assert service.finished == [True, True]

    @pytest.mark.parametrize("cuts", [[], [1], [5, 5, 100_000]])
    def test_pushed_bytes_arrive(self, connect, service, cuts):
        edges = [0, *cuts, len(self.stock)]
        pieces = [memoryview(self.stock)[a:b] for a, b in pairwise(edges)]
        link = connect()
        answer = link.push(messages.Write(b"", 1), lambda granted: [pieces], deadline_s=soon())
        assert answer == messages.Count(len(self.stock))
        assert service.received == self.stock
        assert service.finished == [True]

    def test_what_arrived_is_seen_before_the_next_is_asked_for(self, connect, service):
        buffer = bytearray(len(self.stock))
        edges = [0, 1, 4000, 70_000, 70_000, len(buffer)]
        checked = []

        def place(answer: messages.Answer) -> Iterator[list[memoryview]]:
            for first, end in pairwise(edges):
                yield [memoryview(buffer)[first:end]]
                checked.append(buffer[first:end] == self.stock[first:end])

        connect().call(messages.Read(b""), place, deadline_s=soon())
        assert checked == [True] * 5

    def test_what_goes_out_is_made_as_it_goes(self, connect, service):
        made = []

        def pick(answer: messages.Answer) -> Iterator[list[memoryview]]:
            for start in range(0, len(self.stock), 100_000):
                made.append(start)
                yield [memoryview(self.stock)[start : start + 100_000]]

        assert connect().push(messages.Write(b"", 1), pick, deadline_s=soon()) == messages.Count(len(self.stock))
        assert service.received == self.stock
        assert len(made) == 24

    def test_posted_requests_are_answered_in_order(self, connect, service):
        link = connect()
        assert not link.wait_ready(0.0)
        assert not link.wait_ready(0.01)
        for request in (messages.GetStats(), messages.Attach(), messages.Delete(b""), messages.GetView()):
            link.post(request, deadline_s=soon())
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
        assert link.collect(deadline_s=soon()) == messages.Stats(b"Attach")
        with pytest.raises(UsageError, match="not for deletion"):
            link.collect(deadline_s=soon())
        assert link.wait_ready(10.0)
        assert link.wait_ready(0.0)
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetView")
        assert not link.wait_ready(0.0)
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")

    def test_as_many_as_may_be_posted(self, connect):
        link = connect()
        for _ in range(MAX_POSTED):
            link.post(messages.GetStats(), deadline_s=soon())
        for _ in range(MAX_POSTED):
            assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")

    def test_while_something_is_posted_nothing_else_is_asked(self, connect):
        link = connect()
        link.post(messages.GetStats(), deadline_s=soon())
        with pytest.raises(AssertionError):
            link.call(messages.GetStats(), deadline_s=soon())
        with pytest.raises(AssertionError):
            link.call(messages.Read(b""), lambda answer: [], deadline_s=soon())
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
        with pytest.raises(AssertionError):
            link.collect(deadline_s=soon())

    def test_reads_that_are_asked_for_ahead(self, connect, service):
        link = connect()
        buffers = [bytearray(len(self.stock)) for _ in range(5)]
        for _ in buffers[:2]:
            link.post(messages.Read(b""), deadline_s=soon())
        for number, buffer in enumerate(buffers):
            if number + 2 < len(buffers):
                link.post(messages.Read(b""), deadline_s=soon())
            link.collect(lambda answer, into=buffer: [[memoryview(into)]], deadline_s=soon())
        link.post(messages.GetStats(), deadline_s=soon())
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
        assert buffers == [self.stock] * 5
        assert service.finished == [True] * 5

    def test_what_was_posted_is_lost_with_the_link(self, connect, service):
        link = connect()
        link.call(messages.GetStats(), deadline_s=soon())
        link.post(messages.Read(b""), deadline_s=soon())
        link.post(messages.GetStats(), deadline_s=soon())
        link.close()
        with pytest.raises(PeerUnavailable):
            link.collect(lambda answer: [], deadline_s=soon())
        with pytest.raises(PeerUnavailable):
            link.post(messages.GetStats(), deadline_s=soon())
        assert service.sessions[0].closed.wait(5.0)
        assert len(service.finished) <= 1

    def test_a_failure_instead_of_bytes(self, connect):
        link = connect()
        with pytest.raises(UsageError):
            link.call(messages.Delete(b""), lambda answer: pytest.fail("asked for buffers"), deadline_s=soon())
        with pytest.raises(UsageError):
            link.push(messages.Delete(b""), lambda answer: pytest.fail("asked for bytes"), deadline_s=soon())
        link.call(messages.GetStats(), deadline_s=soon())

    def test_an_error_of_the_caller_ends_the_link_and_the_lease(self, connect, service):
        link = connect()

        def refuse(answer: messages.Answer) -> Runs:
            raise ProtocolError("not what I wanted")

        with pytest.raises(ProtocolError):
            link.call(messages.Read(b""), refuse, deadline_s=soon())
        assert service.sessions[0].closed.wait(5.0)
        assert len(service.finished) == 1  # usually [False]; [True] if the server had already sent all bytes
        with pytest.raises(PeerUnavailable):
            link.call(messages.GetStats(), deadline_s=soon())

    def test_a_deadline_that_has_passed(self, connect):
        with pytest.raises(PeerUnavailable, match="deadline"):
            connect().call(messages.GetStats(), deadline_s=time.monotonic() - 1.0)

    def test_closing_ends_the_session(self, connect, service):
        link = connect()
        link.call(messages.GetStats(), deadline_s=soon())
        assert not link.closed
        link.close()
        link.close()
        assert link.closed
        assert service.sessions[0].closed.wait(5.0)

    def test_many_links_at_once(self, connect, service):
        def use(link: Link) -> list[bytes]:
            buffers = [bytearray(len(self.stock)) for _ in range(5)]
            for buffer in buffers:
                link.call(messages.Read(b""), lambda answer, into=buffer: [[memoryview(into)]], deadline_s=soon())
            return buffers

        with ThreadPoolExecutor(6) as pool:
            for buffers in pool.map(use, [connect() for _ in range(6)]):
                assert buffers == [self.stock] * 5
        assert len(service.sessions) == 6

    def test_a_bug_in_the_service_ends_one_connection(self, connect, service):
        link, other = connect(), connect()
        other.call(messages.GetStats(), deadline_s=soon())
        with pytest.raises((PeerUnavailable, RuntimeError)):
            link.call(messages.Why(b""), deadline_s=soon())
        with pytest.raises(PeerUnavailable):
            link.call(messages.GetStats(), deadline_s=soon())
        assert other.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")

    def test_a_link_in_a_forked_child_is_closed_and_the_parents_is_not(self, connect, service):
        link = connect()
        link.call(messages.GetStats(), deadline_s=soon())
        link.post(messages.GetStats(), deadline_s=soon())
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert link.closed
                link.close()
                link.call(messages.GetStats(), deadline_s=soon())
            except PeerUnavailable:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
        assert not service.sessions[0].closed.is_set()

    def test_nobody_there(self, connect, shm_dir):
        other, stop = self.serve(Warehouse(b"x"), str(shm_dir / "other"))
        stop()
        with pytest.raises(PeerUnavailable):
            other()

    def test_waiting_for_an_answer_costs_no_more_than_the_given_time(self, connect, service):
        link = connect()
        service.hold.clear()
        link.post(messages.GetStats(), deadline_s=soon())
        began_s = time.monotonic()
        assert not link.wait_ready(0.05)
        assert not link.wait_ready(0.0)
        assert 0.05 <= time.monotonic() - began_s < 1.0
        threading.Timer(0.05, service.hold.set).start()
        assert link.wait_ready(10.0)
        assert link.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")

    def test_a_broken_connection_is_ready(self, connect, service):
        link = connect()
        service.hold.clear()
        link.post(messages.Why(b""), deadline_s=soon())
        assert not link.wait_ready(0.01)
        service.hold.set()
        assert link.wait_ready(10.0)
        with pytest.raises(PeerUnavailable):
            link.collect(deadline_s=soon())

    def test_an_answer_that_comes_too_late(self, connect, service):
        link = connect()
        service.hold.clear()
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable):
            link.call(messages.GetStats(), deadline_s=soon(0.1))
        assert time.monotonic() - began_s < 2.0
        service.hold.set()
        assert service.sessions[0].closed.wait(5.0)


class TestTcp(LinkContract):
    local = False

    def address(self, tmp: str) -> str:
        return "127.0.0.1:0"


class TestTls(TestTcp):
    @pytest.fixture(autouse=True)
    def use_tls(self, tls):
        self.tls = tls


class TestUnix(LinkContract):
    local = True

    def address(self, tmp: str) -> str:
        return f"unix:{tmp}.sock"

    @pytest.fixture(autouse=True)
    def remove_sockets(self, shm_dir):
        yield
        for path in shm_dir.parent.glob(shm_dir.name + "*.sock"):
            path.unlink()


class TestUnixWithoutFile(LinkContract):
    local = True

    def address(self, tmp: str) -> str:
        return f"unix:@{tmp}"
