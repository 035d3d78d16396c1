"""Helpers for tests of drains: they start a drain, wait for its end, and move chunks from memory to a node's tier."""

import time
from contextlib import closing

from raykv.embedded import EmbeddedCluster
from raykv.node.moving import Progress
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.protocol.reasons import Reason
from raykv.transport.link import Link
from raykv.types import KeyArray
from tests.support.nodes import wait_until


def drain(running: EmbeddedCluster, node: int, rate: float = 1e12) -> None:
    address = running.nodes[node].member.local_address
    with closing(Link.connect(address, b"", deadline_s=time.monotonic() + 5.0)) as link:
        link.call(messages.Drain(rate), deadline_s=time.monotonic() + 5.0)


def drained(running: EmbeddedCluster, *nodes: int, rate: float = 1e12, timeout_s: float = 20.0) -> Progress:
    """Drain nodes at the same time, and return the progress of the first one at its end."""
    for node in nodes:
        drain(running, node, rate)
    wait_until(lambda: all(running.nodes[node].drain.progress.state == "done" for node in nodes), timeout_s)
    running.settle()
    return running.nodes[nodes[0]].drain.progress


def leave(running: EmbeddedCluster, *nodes: int) -> None:
    for node in nodes:
        running.nodes[node].stop(unlink=True)
    running.settle()


def stored_on(running: EmbeddedCluster, node: int, keys: KeyArray) -> list[bool]:
    """Return for each chunk whether it is in the memory of a node."""
    return (running.nodes[node].store.table.find(keys) >= 0).tolist()


def lower(node: Node, keys: KeyArray) -> None:
    """Move chunks from memory to the node's first tier."""
    mover, store = node.mover, node.store
    wait_until(lambda: mover.tiers[0].stats()["state"] == "on")
    rows = store.table.find(keys)
    chunks, taken = mover.demotion.write(mover.tiers[0], rows, keys)
    assert taken == len(chunks) == len(keys)
    wait_until(lambda: mover.tiers[0].has(keys).all() and not mover.demotion.writing)
    with node.lock:
        store.evictor.remove(rows, store.table.ticks(time.monotonic()), Reason.EVICTED)
    node._wake_all()
    wait_until(lambda: node.announced)
