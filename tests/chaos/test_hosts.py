"""The test's network does what it says: partitions have a direction, and loss has its share."""

import ctypes
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.hosts import Network, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

CLONE_NEWNET = 0x40000000
SENT = 2000


def socket_on(network: Network, host: str) -> socket.socket:
    """Return a datagram socket of a host. A socket stays in the namespace of the thread that made it."""

    def make() -> socket.socket:
        descriptor = os.open(network.file(host), os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) == 0
        finally:
            os.close(descriptor)
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        made.bind((network.addresses[host], 9))
        made.settimeout(0.2)
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(["a", "b", "c"])
    yield made
    made.close()
    assert not os.path.exists(made.file("a"))


@pytest.fixture
def sockets(network: Network) -> Iterator[dict[str, socket.socket]]:
    made = {host: socket_on(network, host) for host in network.addresses}
    yield made
    for each in made.values():
        each.close()


def arrives(network: Network, sockets: dict[str, socket.socket], sender: str, receiver: str) -> bool:
    sockets[sender].sendto(b"x", (network.addresses[receiver], 9))
    try:
        return sockets[receiver].recv(1) == b"x"
    except TimeoutError:
        return False


def test_a_partition_has_a_direction_and_an_end(network, sockets):
    pairs = [(one, other) for one in "abc" for other in "abc" if one != other]
    assert all(arrives(network, sockets, *pair) for pair in pairs)
    network.cut("a", "b")
    assert [pair for pair in pairs if not arrives(network, sockets, *pair)] == [("a", "b")]
    network.mend("a", "b")
    assert all(arrives(network, sockets, *pair) for pair in pairs)


def test_loss_has_its_share_and_an_end(network, sockets):
    def arrived() -> int:
        for _ in range(SENT):
            sockets["a"].sendto(b"x", (network.addresses["b"], 9))
        count = 0
        try:
            while sockets["b"].recv(1):
                count += 1
        except TimeoutError:
            return count
        return count

    assert arrived() == SENT
    network.set_loss("a", 30)
    assert 0.64 * SENT < arrived() < 0.76 * SENT  # six standard deviations
    network.set_loss("a", 0)
    assert arrived() == SENT


def test_a_rate_holds_packets_back(network, sockets):
    network.set_rate("a", 1)
    packet, sent, began_s = bytes(1000), 200, time.monotonic()
    for _ in range(sent):
        sockets["a"].sendto(packet, (network.addresses["b"], 9))
        sockets["b"].recv(2000)
    assert time.monotonic() - began_s > 0.8  # 64 kB pass at once, 136 kB at 125 kB/s
    network.set_rate("a", 0)
    assert arrives(network, sockets, "a", "b")
