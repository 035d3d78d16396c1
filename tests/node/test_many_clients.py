"""Clients connect, take leases and vanish, thousands of times. The node gets all leases back, and does not grow."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from raykv.errors import RayKVError
from raykv.protocol import messages
from raykv.transport.link import Link
from tests.support.nodes import SECRET, SPACE, NodeProcess, content, keys_of, names, node_process, wait_until
from tests.support.soak import soak

NBYTES = 5000
CHUNKS = names(50)
MOST_GROWTH = 1.1
"""The node's memory may grow by this factor between a tenth of the cycles and all of them."""


def resident_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("Private_Clean", "Private_Dirty")))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def take_leases(link: Link, rng: random.Random) -> None:
    deadline_s, group = time.monotonic() + 10.0, SPACE.group.digest
    if rng.random() < 0.7:
        link.call(messages.Pin(keys_of(rng.sample(CHUNKS, rng.randrange(1, 20)))), deadline_s=deadline_s)
    if rng.random() < 0.7:
        link.call(messages.Lend(NBYTES, rng.randrange(1, 8), ahead=2, group=group), deadline_s=deadline_s)
    if rng.random() < 0.3:  # and vanish in the middle of an exchange
        link.post(messages.Read(keys_of(rng.sample(CHUNKS, 20))), deadline_s=deadline_s)


def vanish(node: NodeProcess, rng: random.Random) -> None:
    """Connect, take leases, and end without giving them back: by closing the socket, or by the end of a process."""
    address, secret = rng.choice([(node.local_address, b""), (node.address, bytes.fromhex(SECRET))])
    if rng.random() < 0.02:
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                take_leases(Link.connect(address, secret, deadline_s=time.monotonic() + 10.0), rng)
            os._exit(0)
        os.waitpid(pid, 0)
        return
    link = Link.connect(address, secret, deadline_s=time.monotonic() + 10.0)
    try:
        with suppress(RayKVError):
            take_leases(link, rng)
    finally:
        link.close()


def cycles(node: NodeProcess, count: int, rng: random.Random) -> None:
    pid = node.process.pid
    with node.client() as client:
        client.put(CHUNKS, [content(name, NBYTES) for name in CHUNKS])

    def settled() -> bool:
        stats = node.stats()
        return stats["lent_nbytes"] == 0 and descriptors(pid) <= fewest

    fewest = descriptors(pid)
    for _ in range(count // 10):
        vanish(node, rng)
    wait_until(settled)
    early_nbytes, early = resident_nbytes(pid), descriptors(pid)
    for _ in range(count - count // 10):
        vanish(node, rng)
    wait_until(settled)
    late_nbytes, late = resident_nbytes(pid), descriptors(pid)
    print(f"{count} clients: {early_nbytes:,} and {late_nbytes:,} bytes, {early} and {late} descriptors")
    assert late_nbytes <= MOST_GROWTH * early_nbytes
    assert late <= early + 2
    with node.client() as client:
        client.delete(CHUNKS)
        wait_until(lambda: node.stats()["used_nbytes"] == 0)  # a pinned chunk would keep its slot


@pytest.mark.slow
def test_clients_that_vanish_leave_nothing(shm_dir, rng: random.Random):
    with node_process(shm_dir) as node:
        cycles(node, 600, rng)


@pytest.mark.soak
def test_ten_thousand_clients_that_vanish_leave_nothing(shm_dir, rng: random.Random):
    with node_process(shm_dir) as node:
        cycles(node, soak("clients", 10_000), rng)
