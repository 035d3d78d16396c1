"""Measures what RDMA costs a CPU: posting requests, and registering a large arena while a node serves.

Run by hand: `python -m benchmarks.rdma`. It boots a User-Mode kernel with soft-RoCE devices (see
`tests.rdma.user_mode`): the program's own code runs at the processor's speed there, system calls are slower.

* Posting: a queue pair is filled with reads, in batches as a transfer has them. Each reads few bytes, because the soft
  device moves them on the same processors meanwhile. The time includes one call of the kernel for each batch.
* Registration: a node with a full arena is killed. Until it answers again, a client asks for a chunk over a socket.
  Then the client goes on asking until the arena is registered. The same without RDMA, for comparison: in this kernel,
  and on the machine itself. The times to the first hit spread widely in this kernel, so three kills tell little.
"""

import argparse
import gc
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from raykv import connect
from raykv.config import MIB, NodeConfig
from raykv.embedded import InProcessMembership
from raykv.errors import RayKVError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import expect
from raykv.protocol.namespace import Namespace
from raykv.supervisor.handle import NodeHandle
from raykv.transport.link import Link

SECRET: Final = bytes(range(32))
ROUNDS: Final = 3
TIMES: Final = 50
REQUEST_NBYTES: Final = 64
CHUNK_NBYTES: Final = 16 * MIB
NAMESPACE: Final = Namespace(model="m")
INSIDE: Final = "RAYKV_USER_MODE"
"""This variable is set in the machine."""
TIMEOUT_S: Final = 900.0
KILL_S: Final = 60.0
"""The machine may take TIMEOUT_S, and this for each kill."""
SERVE_S: Final = 5.0
"""For so long a node without RDMA is asked after each kill."""
ASK_S: Final = 0.005
"""Between two questions for the first hit. The node's first heartbeat is answered by this process, so asking
without a pause delays the start that is measured."""
TARGET: Final = memoryview(bytearray(CHUNK_NBYTES))
"""Every read fills it. Memory of its own for each question would take the processor from the node that starts."""


def main() -> int:
    """Boot the machine with this program in it, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=int, default=16, help="size of the arena that is registered")
    parser.add_argument("--kills", type=int, default=5, help="how often the node is killed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # as an exception, so that nothing is left
    if INSIDE in os.environ:
        _measure(arguments.gib, arguments.kills)
        return 0
    from tests.rdma import packages, user_mode

    print("on the machine itself:", flush=True)
    _restarts(arguments.gib, arguments.kills, "off")
    environment = {"PYTHONPATH": f"{Path.cwd()}:{packages.fetch().python}", INSIDE: "1"}
    command = [sys.executable, "-m", "benchmarks.rdma", *sys.argv[1:]]
    setup = "sh tests/rdma/network.sh"
    memory, timeout_s = f"{arguments.gib * 5 // 4 + 2}G", TIMEOUT_S + KILL_S * arguments.kills
    try:
        return user_mode.run(command, setup=setup, environment=environment, timeout_s=timeout_s, memory=memory)
    except packages.Unavailable as error:
        print(f"not run: {error}")
        return 2


def _measure(gib: int, kills: int) -> None:
    print(f"{os.cpu_count()} CPUs; kernel {os.uname().release}")
    for turn in range(ROUNDS):
        median_us, fastest_us = _posting_us()
        print(f"posting, round {turn + 1}: {median_us:.2f} us a request; {fastest_us:.2f} us in the fastest batch")
    for rdma in ("off", "auto"):
        _restarts(gib, kills, rdma)


# -- posting ----------------------------------------------------------------------------------------------------------


def _posting_us() -> tuple[float, float]:
    """Return the median time to post a request, and that of the fastest batch, in microseconds.

    In the fastest batch, the soft device has not taken the processor meanwhile.
    """
    from raykv.transport.rdma.device import READABLE, open_devices
    from raykv.transport.rdma.queue_pair import DEPTH, Piece, QueuePair

    near, far = open_devices()
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[:] = bytes(len(memory))
    address = np.frombuffer(memory, np.uint8).ctypes.data
    target, source = (device.register(address, len(memory), remote=READABLE) for device in (near, far))
    reader, holder = QueuePair(near), QueuePair(far)
    reader.connect(holder.end, remote=0)
    holder.connect(reader.end, remote=READABLE)
    pieces = [Piece(address, int(target.lkey), address + REQUEST_NBYTES, int(source.rkey), REQUEST_NBYTES)] * DEPTH
    took_s = []
    for _ in range(TIMES):
        began_s = time.perf_counter()  # this takes up to 50 us here
        number = reader.read(pieces, deadline_s=began_s + 10.0)
        took_s.append((time.perf_counter() - began_s) / DEPTH)
        reader.wait(number, deadline_s=time.monotonic() + 10.0)
    for each in (reader, holder, target, source, near, far):
        each.close()
    later_s = took_s[1:]  # the first time, each page of the queue is a page fault
    return 1e6 * statistics.median(later_s), 1e6 * min(later_s)


# -- registration -----------------------------------------------------------------------------------------------------


def _restarts(gib: int, kills: int, rdma: str) -> None:
    """Fill a node's arena, kill the node repeatedly, and print how long it is away and how fast it answers then."""
    home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
    storage = {"arena_nbytes": f"{gib} GiB", "shm_dir": str(home), "low_water": 0.0, "high_water": 0.001}
    config = NodeConfig.load({"cluster": "bench", "node_id": "n", "rdma": rdma, "storage": storage})
    node = NodeHandle(config, secret=SECRET, membership=InProcessMembership(member_timeout_s=60.0))
    try:
        count = (gib << 30) // CHUNK_NBYTES - 2
        keys = _fill(config, count)
        ends, away, waits, registered = [], [], [], []
        for turn in range(kills):
            starts, killed_s = node.starts, time.monotonic()
            os.kill(node.pid, signal.SIGKILL)
            ended_s = _end_of(node.pid)
            ends.append(ended_s - killed_s)
            away.append(_first_hit(config, keys[turn % count]) - ended_s)
            while node.starts == starts:
                time.sleep(0.001)
            found, took = _until_registered(node, config, keys, ended_s)
            waits += found
            registered.append(took)
        stats = node.stats()
        print(
            f"rdma={rdma}: {count} chunks of {CHUNK_NBYTES >> 20} MiB, {stats['recovered']} recovered; "
            f"{stats.get('rdma', {}).get('registered_nbytes', 0) / 2**30:.2f} GiB registered\n"
            f"  from the kill to the end of the process: median {1e3 * statistics.median(ends):.0f} ms\n"
            f"  from the end of the process to the first hit: median {1e3 * statistics.median(away):.0f} ms, "
            f"worst {1e3 * max(away):.0f} ms, all: {' '.join(f'{1e3 * each:.0f}' for each in away)}\n"
            f"  a get of one chunk meanwhile: median {1e3 * statistics.median(waits):.1f} ms, "
            f"worst {1e3 * max(waits):.0f} ms of {len(waits)}\n"
            f"  from the end of the process until all is registered: median {statistics.median(registered):.1f} s"
        )
    finally:
        node.stop(unlink=True)
        shutil.rmtree(home, ignore_errors=True)
        gc.collect()  # the client that has filled the arena maps it


def _fill(config: NodeConfig, count: int) -> list[bytes]:
    """Store chunks until the arena is full. Returns their keys."""
    value, keys = bytes(CHUNK_NBYTES), []
    with connect(NAMESPACE, address=config.local_address) as client:
        for number in range(count):
            key = client.keys([str(number)])
            until_s = time.monotonic() + 60.0
            while not client.put(key, [value]).stored:  # memory comes in the background
                assert time.monotonic() < until_s, "the arena does not grow"
                time.sleep(0.05)
            keys.append(chunk_keys.to_bytes(key))
    return keys


def _read(config: NodeConfig, key: bytes) -> bool:
    """Ask the node for one chunk over a socket, without its shared memory. Returns whether it came."""
    deadline_s = time.monotonic() + 30.0
    with closing(Link.connect(config.local_address, SECRET, deadline_s=deadline_s)) as link:
        answer = link.call(
            messages.Read(key),
            lambda answer: [[TARGET]] if any(expect(messages.Reading, answer).nbytes) else [],
            deadline_s=deadline_s,
        )
    return any(expect(messages.Reading, answer).nbytes)


def _end_of(pid: int) -> float:
    """Wait until a process is gone. Returns when, by the monotonic clock. The kernel has to unpin its memory first."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return time.monotonic()
        time.sleep(0.0005)


def _first_hit(config: NodeConfig, key: bytes) -> float:
    """Ask until a chunk arrives. Returns when, by the monotonic clock."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        try:
            if _read(config, key):
                return time.monotonic()
        except (RayKVError, OSError):
            pass
        time.sleep(ASK_S)
    raise TimeoutError("no hit")


def _until_registered(
    node: NodeHandle, config: NodeConfig, keys: list[bytes], ended_s: float
) -> tuple[list[float], float]:
    """Read chunks until the arena is registered, or for SERVE_S without RDMA.

    Returns:
        The seconds of each read, and the seconds from `ended_s` until then.
    """
    waits: list[float] = []
    while True:
        for key in keys[len(waits) % len(keys) :][:20]:
            began_s = time.monotonic()
            assert _read(config, key)
            waits.append(time.monotonic() - began_s)
        took_s = time.monotonic() - ended_s
        if config.rdma == "off":
            if took_s > SERVE_S:
                return waits, took_s
        elif node.stats()["rdma"].get("registered_nbytes") == config.storage.arena_nbytes:
            return waits, took_s


if __name__ == "__main__":
    sys.exit(main())
