"""What fails over RDMA: the chunk arrives over TCP, or is a miss by the deadline. See conftest.py."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

import raykv
from raykv.errors import RayKVError, TransientError
from raykv.protocol import messages
from raykv.protocol.rdma import QueuePairEnd
from raykv.transport.link import Link
from tests.rdma.support import START_S, content, pair
from tests.support.nodes import wait_until

pytestmark = pytest.mark.verbs

SIZE = 400_000


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr("raykv.transport.one_sided.path.RETRY_S", 1.0)
    monkeypatch.setattr("raykv.client.root_copies.COPY_READS", 1 << 30)  # so that all reads go to the other node
    with pair() as made:
        made.wait_registered()
        yield made


def read(both, names: list[str], **options) -> dict[str, int]:
    """Read chunks that `Pair.put` has stored first, and return the bytes by path."""
    result, into = both.get(names, [SIZE] * len(names), **options)
    assert result.hits == (True,) * len(names)
    assert [bytes(each) for each in into] == [content(number, SIZE) for number in range(len(names))]
    return result.nbytes_by_path


def test_a_wrong_key_of_the_registration(both, monkeypatch):
    names = both.put([SIZE] * 4)
    exports = both.cluster.nodes[0]._one_sided._rdma._exports
    right = exports._keys.copy()
    exports._keys ^= 0x5A
    assert read(both, names) == {"tcp": 4 * SIZE}
    (reason,) = over_tcp(both).values()
    assert "status 10" in reason  # remote access error
    exports._keys[:] = right
    wait_until(lambda: not over_tcp(both))
    assert read(both, names) == {"rdma": 4 * SIZE}


def over_tcp(both) -> dict[str, str]:
    return both.reader.stats()["data_paths"]["rdma"]["over_tcp"]


def rails_out(both) -> list[str]:
    ports = both.reader.stats()["data_paths"]["rdma"]["ports"]
    return [name for name, port in ports.items() if not port["in_use"]]


def test_a_link_that_goes_down_and_comes_back(both):
    """The other device still reads, because its packets to itself do not leave the host."""
    names = both.put([SIZE] * 4)
    assert read(both, names) == {"rdma": 4 * SIZE}
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    try:
        assert read(both, names) == {"rdma": 4 * SIZE}
        assert rails_out(both) == ["rxe0:1"]
    finally:
        subprocess.run(["sh", "tests/rdma/link_up.sh"], check=True)
    wait_until(lambda: read(both, names) == {"rdma": 4 * SIZE} and not rails_out(both), START_S)


def test_a_rail_that_cannot_connect_is_left_out(both):
    """Connections that begin while a port is down use the other one."""
    names = both.put([SIZE] * 4)
    client = both.cluster.client(raykv.Namespace(model="m"), node=1, timeout_s=20.0)  # has opened both devices
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    try:
        result = client.get(names, [bytearray(SIZE) for _ in names])
        assert result.nbytes_by_path == {"rdma": 4 * SIZE}
        ports = client.stats()["data_paths"]["rdma"]["ports"]
        assert ports["rxe1:1"]["in_use"]
    finally:
        subprocess.run(["sh", "tests/rdma/link_up.sh"], check=True)


def test_no_rail_is_left(both):
    names = both.put([SIZE] * 4)
    assert read(both, names) == {"rdma": 4 * SIZE}
    for interface in ("va", "vb"):
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
    try:
        assert read(both, names) == {"tcp": 4 * SIZE}
        assert over_tcp(both)
    finally:
        subprocess.run(["sh", "tests/rdma/link_up.sh"], check=True)


def test_a_rail_that_fails_in_the_middle(both, monkeypatch):
    from raykv.transport.rdma import verbs
    from raykv.transport.rdma.queue_pair import QueuePair

    names = both.put([1 << 20] * 8)
    broken, posted = [], QueuePair.read

    def read_and_break(pair, pieces, *, deadline_s):
        if pair.device.name == "rxe1" and not broken:
            broken.append(pair)
            attributes = verbs.QPAttr()
            attributes.qp_state = verbs.enums.IBV_QPS_ERR
            pair._pair.modify(attributes, verbs.enums.IBV_QP_STATE)
        return posted(pair, pieces, deadline_s=deadline_s)

    def get() -> None:
        result, into = both.get(names, [1 << 20] * 8)
        assert result.nbytes_by_path == {"rdma": 8 << 20}
        assert [bytes(each) for each in into] == [content(number, 1 << 20) for number in range(8)]

    get()
    monkeypatch.setattr(QueuePair, "read", read_and_break)
    get()
    assert broken
    assert rails_out(both) == ["rxe1:1"]
    get()  # over the other rail alone

    def is_back() -> bool:
        get()
        return not rails_out(both)

    wait_until(is_back, START_S)


def serve(address) -> None:
    with raykv.embedded(1, name="killed", arena_nbytes="64 MiB", extent_nbytes="4 MiB") as cluster:
        node = cluster.nodes[0]
        wait_until(lambda: "rdma" in node.member.endpoints, START_S)
        client = cluster.client(raykv.Namespace(model="m"))
        client.put([f"chunk-{number}" for number in range(4)], [content(0, SIZE)] * 4)
        wait_until(lambda: node.stats()["rdma"]["registered_nbytes"] >= 64 << 20, START_S)
        wait_until(lambda: "rdma" in node.view.members[0].endpoints, START_S)
        address.put((node.member.address, cluster.secret))
        signal.pause()


@pytest.mark.parametrize("timeout_s", [1.0, pytest.param(4.0, marks=pytest.mark.soak)])
def test_a_holder_that_is_killed_in_the_middle(timeout_s):
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    process = context.Process(target=serve, args=(address,))
    process.start()
    try:
        where, secret = address.get(timeout=START_S)
        client = raykv.connect(raykv.Namespace(model="m"), address=where, secret=secret, timeout_s=20.0)
        names, late, hits = [f"chunk-{number}" for number in range(4)], [], 0
        killer = threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL))
        into = [bytearray(SIZE) for _ in names]
        assert client.get(names, into).nbytes_by_path == {"rdma": 4 * SIZE}
        killer.start()
        until_s = time.monotonic() + 3 * timeout_s
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            result = client.get(names, into, timeout_s=timeout_s)
            late.append(time.monotonic() - began_s - timeout_s)
            hits += sum(result.hits)
            for hit, each in zip(result.hits, into, strict=True):
                assert not hit or bytes(each) == content(0, SIZE)
        assert hits > 0
        assert not any(result.hits)  # the process was killed
        assert max(late) < 0.2  # an emulated processor
        client.close()
    finally:
        process.kill()
        process.join()


def test_garbage_for_a_peer(both):
    """A peer may name any address. The node refuses, and its other connections live on."""
    names = both.put([SIZE] * 4)
    node = both.cluster.nodes[0]
    for gid in ("", "nonsense", "::" * 20, "0000:0000:0000:0000:0000:0000:0000:0000"):
        end = QueuePairEnd(gid, 0, 17, 1, 3)
        link = Link.connect(node.member.address, bytes.fromhex(both.cluster.secret), deadline_s=time.monotonic() + 10.0)
        with suppress(RayKVError):
            link.call(messages.ConnectRdma((end,) * 3), deadline_s=time.monotonic() + 10.0)
        assert not link.closed  # it was refused with an answer, or accepted
        link.close()
    wait_until(lambda: node.stats()["rdma"]["queue_pairs"] == 0, START_S)
    assert node.stats()["errors"].get("ConnectRdma", 0) >= 3
    assert read(both, names) == {"rdma": 4 * SIZE}


def test_a_process_with_more_files_than_select_can_watch(both):
    names = both.put([SIZE] * 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    many = [os.dup(0) for _ in range(1100)]
    try:
        assert read(both, names) == {"rdma": 4 * SIZE}
    finally:
        for fd in many:
            os.close(fd)


def test_a_forked_child_reads_over_its_own_queue_pairs(both):
    names = both.put([SIZE] * 4)
    assert read(both, names) == {"rdma": 4 * SIZE}
    inherited = both.cluster.nodes[0].stats()["rdma"]["queue_pairs"]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with suppress(TransientError):  # its first call may be late: it opens the devices
                read(both, names)
            status = 0 if read(both, names) == {"rdma": 4 * SIZE} else 2
            gc.collect()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    requests = both.requests()
    assert read(both, names) == {"rdma": 4 * SIZE}
    assert both.requests()["ConnectRdma"] == requests["ConnectRdma"]  # the parent's queue pairs still work
    assert both.cluster.nodes[0].stats()["rdma"]["queue_pairs"] >= inherited


def test_a_channel_that_gets_the_descriptor_of_another_one_is_found(monkeypatch):
    """Another thread closes a channel just when one is made, so the new one has a number that was there before."""
    from raykv.transport.rdma import verbs
    from raykv.transport.rdma.device import open_devices

    device = open_devices()[0]
    other, _ = verbs.open_channel(device.context)
    make, made = verbs.CompChannel, []

    def make_after_close(context):
        if not made:
            other.close()
        made.append(make(context))
        return made[-1]

    monkeypatch.setattr(verbs, "CompChannel", make_after_close)
    try:
        channel, fd = verbs.open_channel(device.context)
        assert channel is made[-1]
        assert "infinibandevent" in os.readlink(f"/proc/self/fd/{fd}")
        verbs.close_channel(channel)
    finally:
        device.close()
