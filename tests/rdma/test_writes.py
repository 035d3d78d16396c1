"""Pushes over RDMA: puts of a client without a node, drains, replicas, and what fails. See conftest.py."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raykv
from raykv.client import root_copies
from raykv.membership import heat_map
from raykv.protocol import messages
from raykv.transport.bulk_write import Placement
from tests.rdma.support import START_S, TIMEOUT_S, Pair, content, pair
from tests.support.drains import drained, stored_on
from tests.support.nodes import wait_until

pytestmark = pytest.mark.verbs

SPACE = raykv.Namespace(model="m")
SIZE = 400_000


class Pushes:
    """Two nodes, and a client on a host without a node, so that its puts go to the owner of each first key."""

    def __init__(self, both: Pair) -> None:
        self.nodes, self.reader = both.cluster.nodes, both.reader
        self.cluster = both.cluster
        address, secret = self.nodes[0].member.address, both.cluster.secret
        self.client = raykv.connect(SPACE, address=address, secret=secret, timeout_s=TIMEOUT_S)
        for node in self.nodes:
            wait_until(
                lambda node=node: node.stats()["rdma"].get("registered_nbytes", 0) >= node.store.arena.nbytes, START_S
            )

    def received(self) -> int:
        """Return how many chunks the nodes have received by WRITE."""
        return sum(node.stats()["rdma"]["received"] for node in self.nodes)

    def put(self, first: int, sizes: list[int]) -> raykv.PutResult:
        """Put the chunks with the numbers from `first` at once."""
        numbers = range(first, first + len(sizes))
        values = [content(number, size) for number, size in zip(numbers, sizes, strict=True)]
        return self.client.put([f"push-{number}" for number in numbers], values)

    def check(self, first: int, sizes: list[int]) -> None:
        """Check that all chunks can be read, with the right bytes, and that no slot is lent."""
        self.cluster.settle(timeout_s=START_S)
        numbers = range(first, first + len(sizes))
        into = [bytearray(size) for size in sizes]
        assert self.reader.get([f"push-{number}" for number in numbers], into).hits == (True,) * len(sizes)
        for number, each in zip(numbers, into, strict=True):
            assert bytes(each) == content(number, len(each))
        assert self.lent() == 0

    def lent(self) -> int:
        """Return the bytes of the slots that are lent to clients without a node."""
        return sum(node.store.lent_nbytes for node in self.nodes)

    def over_tcp(self) -> dict[str, str]:
        found: dict[str, str] = self.client.stats()["data_paths"]["rdma"]["over_tcp"]
        return found


@pytest.fixture(scope="module")
def shared() -> Iterator[Pushes]:
    with pair() as both:
        made = Pushes(both)
        yield made
        made.client.close()


@pytest.fixture
def pushes(shared: Pushes, monkeypatch) -> Pushes:
    """The shared nodes, after failures of earlier tests are forgotten."""
    monkeypatch.setattr("raykv.transport.one_sided.path.RETRY_S", 0.5)
    wait_until(lambda: not shared.over_tcp(), START_S)
    return shared


def test_a_put_of_a_client_without_a_node(pushes):
    sizes = [1, 31, 4096, 65_536, 65_537, 300_000, 1 << 20, 2_000_001]
    before = pushes.received()
    assert pushes.put(0, sizes).stored == len(sizes)
    assert pushes.received() - before == len(sizes), "no chunk came over TCP"
    pushes.check(0, sizes)
    assert pushes.put(0, sizes).existed == len(sizes)


def test_several_windows_and_values_in_several_buffers(pushes, monkeypatch):
    monkeypatch.setattr("raykv.transport.rdma.remote_write.WINDOW_NBYTES", 700_000)
    before, sizes = pushes.received(), [300_000] * 7
    values = [content(number, 300_000) for number in range(100, 107)]
    pieces = [[value[:1000], value[1000:1001], value[1001:]] for value in values]
    assert pushes.client.put([f"push-{number}" for number in range(100, 107)], pieces).stored == 7
    assert pushes.received() - before == 7
    pushes.check(100, sizes)


def test_a_wrong_byte_in_a_slot_is_refused(pushes, monkeypatch):
    from raykv.transport.rdma.remote_write import RemoteWrite

    place, broken = RemoteWrite.place, []

    def place_and_damage(self, accepted, values, *, deadline_s) -> Placement:
        placement = place(self, accepted, values, deadline_s=deadline_s)
        if not broken:
            offset = int.from_bytes(accepted.offsets[:8], "little")
            start = self._connection.arena + offset
            (node,) = [node for node in pushes.nodes if node.store.arena.address == self._connection.arena]
            node.store.arena.view[offset + 777] ^= 1
            broken.append(start)
        return placement

    monkeypatch.setattr(RemoteWrite, "place", place_and_damage)
    before = pushes.received()
    result = pushes.put(200, [SIZE] * 4)
    assert (result.stored, result.skipped) == (3, 1)
    assert pushes.received() - before == 3
    names = [f"push-{number}" for number in range(200, 204)]
    wait_until(lambda: list(pushes.client.exists(names)) == [False, True, True, True])  # owners hear of them later
    assert pushes.lent() == 0
    assert pushes.put(200, [SIZE] * 4).stored == 1  # over new queue pairs
    assert pushes.received() - before == 4
    pushes.check(200, [SIZE] * 4)


def test_memory_that_is_not_registered_goes_over_tcp(pushes):
    all_exports = [node._one_sided._rdma._exports for node in pushes.nodes]
    right = [exports._keys.copy() for exports in all_exports]
    before = pushes.received()
    for exports in all_exports:
        exports._keys[:] = 0
    try:
        assert pushes.put(300, [SIZE] * 4).stored == 4
    finally:
        for exports, keys in zip(all_exports, right, strict=True):
            exports._keys[:] = keys
    assert pushes.received() == before
    assert not pushes.over_tcp()
    pushes.check(300, [SIZE] * 4)


def test_a_part_of_a_put_goes_over_tcp(pushes, monkeypatch):
    """One chunk in three is not registered: its bytes follow over TCP, in the same Write."""
    from raykv.transport.rdma.remote_write import RemoteWrite

    slots = RemoteWrite._slots
    monkeypatch.setattr(RemoteWrite, "_slots", lambda self, accepted: slots(self, accepted)[::3])
    before = pushes.received()
    assert pushes.put(400, [SIZE] * 9).stored == 9
    assert pushes.received() - before == 3
    pushes.check(400, [SIZE] * 9)


def test_wrong_keys_of_the_registration(pushes, monkeypatch):
    monkeypatch.setattr("raykv.transport.one_sided.path.RETRY_S", 5.0)
    all_exports = [node._one_sided._rdma._exports for node in pushes.nodes]
    before = pushes.received()
    for exports in all_exports:
        exports._keys ^= 0x5A
    try:
        assert pushes.put(500, [SIZE] * 4).stored == 4
    finally:
        for exports in all_exports:
            exports._keys ^= 0x5A
    assert pushes.received() == before
    (reason,) = pushes.over_tcp().values()
    assert "status 10" in reason  # remote access error
    pushes.check(500, [SIZE] * 4)
    wait_until(lambda: not pushes.over_tcp(), START_S)
    assert pushes.put(510, [SIZE] * 4).stored == 4
    assert pushes.received() - before == 4


def test_a_rail_that_fails_in_the_middle(pushes, monkeypatch):
    from raykv.transport.rdma import verbs
    from raykv.transport.rdma.queue_pair import QueuePair

    broken, posted = [], QueuePair.write

    def write_and_break(self, pieces, *, deadline_s):
        if self.device.name == "rxe1" and not broken:
            broken.append(self)
            attributes = verbs.QPAttr()
            attributes.qp_state = verbs.enums.IBV_QPS_ERR
            self._pair.modify(attributes, verbs.enums.IBV_QP_STATE)
        return posted(self, pieces, deadline_s=deadline_s)

    def put(first: int) -> None:
        before = pushes.received()
        assert pushes.put(first, [1 << 20] * 6).stored == 6
        assert pushes.received() - before == 6, "nothing went over TCP"

    put(600)
    monkeypatch.setattr(QueuePair, "write", write_and_break)
    put(610)
    assert broken
    assert [name for name, port in ports(pushes).items() if not port["in_use"]] == ["rxe1:1"]
    put(620)  # over the other rail alone
    pushes.check(610, [1 << 20] * 6)
    pushes.check(620, [1 << 20] * 6)


def ports(pushes) -> dict[str, Any]:
    found: dict[str, Any] = pushes.client.stats()["data_paths"]["rdma"]["ports"]
    return found


def put_and_hang(address: str, secret: str, hung: Any) -> None:
    """Put chunks. The third put hangs after its writes are posted."""
    from raykv.transport.rdma.transfer import Transfer

    client = raykv.connect(SPACE, address=address, secret=secret, timeout_s=START_S)
    for number in range(700, 702):
        assert client.put([f"push-{number}"], [content(number, SIZE)]).stored == 1

    def hang(*_: object) -> None:
        hung.set()
        threading.Event().wait()

    Transfer.wait = hang
    client.put([f"push-{number}" for number in range(702, 706)], [content(number, SIZE) for number in range(702, 706)])


def test_a_sender_that_is_killed_in_the_middle(pushes):
    context = multiprocessing.get_context("spawn")
    hung, before = context.Event(), sum(node.stats()["rdma"]["queue_pairs"] for node in pushes.nodes)
    process = context.Process(target=put_and_hang, args=(pushes.nodes[0].member.address, pushes.cluster.secret, hung))
    process.start()
    try:
        assert hung.wait(START_S)
        assert pushes.lent() > 0
    finally:
        process.kill()
        process.join()
    wait_until(lambda: pushes.lent() == 0, START_S)
    wait_until(lambda: sum(node.stats()["rdma"]["queue_pairs"] for node in pushes.nodes) <= before, START_S)
    assert not pushes.client.exists([f"push-{number}" for number in range(702, 706)]).any()
    pushes.check(700, [SIZE] * 2)
    assert pushes.put(702, [SIZE] * 4).stored == 4
    pushes.check(700, [SIZE] * 6)


def test_a_forked_child_writes_over_its_own_queue_pairs(pushes):
    assert pushes.put(800, [SIZE]).stored == 1
    before = pushes.received()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            stored = sum(pushes.put(number, [SIZE]).stored for number in range(801, 804))
            status = 0 if stored == 3 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pushes.received() - before == 3
    assert pushes.put(804, [SIZE]).stored == 1
    assert pushes.received() - before == 4
    pushes.check(800, [SIZE] * 5)


def test_a_hot_prefix_gets_its_replica_over_rdma(monkeypatch):
    monkeypatch.setattr(root_copies, "COPY_READS", 1 << 30)
    monkeypatch.setattr(heat_map, "START_S", 0.0)
    with pair(name="hot") as both:
        both.wait_registered()
        cluster = both.cluster
        cluster.membership.logic.heat._hot = 1000.0
        wait_until(
            lambda: cluster.nodes[1].stats()["rdma"].get("registered_nbytes", 0) >= cluster.nodes[1].store.arena.nbytes,
            START_S,
        )
        keys = both.writer.chain(list(range(4)))
        values = [content(900 + place, SIZE) for place in range(4)]
        assert both.writer.put(keys, values).stored == 4
        cluster.settle(timeout_s=START_S)
        into = [bytearray(SIZE) for _ in values]

        def is_copied() -> bool:
            assert both.reader.get(keys, into).hits == (True,) * 4
            return all(stored_on(cluster, 1, keys))

        wait_until(is_copied, START_S)
        wait_until(lambda: cluster.nodes[1].stats()["rdma"]["received"] == 4, START_S)
        assert cluster.nodes[1].stats()["heat"]["replicas"] == 4
        assert is_copied()
        assert [bytes(each) for each in into] == values


def test_a_drain_sends_straight_from_the_arena():
    with pair(name="drained") as both:
        both.wait_registered()
        first, second = both.cluster.nodes
        wait_until(lambda: second.stats()["rdma"].get("registered_nbytes", 0) >= second.store.arena.nbytes, START_S)
        names = both.put([SIZE] * 12)
        progress = drained(both.cluster, 0, timeout_s=START_S)
        assert (progress.moved, progress.left) == (12, 0)
        assert second.stats()["rdma"]["received"] == 12
        assert second.stats()["rdma"]["received_nbytes"] == 12 * SIZE
        assert all(stored_on(both.cluster, 1, both.writer.keys(names)))
        (path,) = [path for path in first._peers._paths._paths if path.name == "rdma"]
        assert path._opened.stages._made == 0
        assert path._opened.devices is first._one_sided._rdma._exports.devices
        result, into = both.get(names, [SIZE] * 12)
        assert result.hits == (True,) * 12
        assert [bytes(each) for each in into] == [content(number, SIZE) for number in range(12)]


def test_a_write_over_rdma_needs_queue_pairs(pushes):
    from raykv.errors import UsageError
    from raykv.transport.link import Link

    until_s = time.monotonic() + 10.0
    link = Link.connect(pushes.nodes[0].member.address, bytes.fromhex(pushes.cluster.secret), deadline_s=until_s)
    with pytest.raises(UsageError, match="ConnectRdma"):
        link.call(messages.Write(bytes(16), SIZE, group=SPACE.group.digest, rdma=True), deadline_s=until_s)
    assert not link.closed
    link.close()
