"""Readers without locks, and a writer that causes evictions all the time. No reader ever gets a wrong byte.

RAYKV_TEST_SEED sets the seed for the choice of keys. The soak variant takes its number of reads and its seed from
RAYKV_SOAK.
"""

import json
import subprocess
import sys

import pytest

from tests.support.soak import soak

COMMON = """
import json, random, sys, time
import numpy as np
import raykv

CHUNKS, SIZES = 3000, [4096, 5000, 12_288, 65_536]
BATCH = 32

def content(number):
    '''Every 8 bytes tell the chunk and the place in it.'''
    places = np.arange(SIZES[number % 4] // 8, dtype=np.uint64)
    return (places + np.uint64(number << 32)) * np.uint64(0x9E3779B97F4A7C15)

def chain(first):
    '''Chunks of one size; every number is in one chain.'''
    return [first + 4 * step for step in range(8) if first + 4 * step < CHUNKS]

address, seed, reads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
client = raykv.connect(raykv.Namespace(model="stress"), address=address)
"""

WRITER = (
    COMMON
    + """
firsts = [32 * block + size for block in range(CHUNKS // 32) for size in range(4)]
print("writing", flush=True)
stored = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    numbers = chain(rng.choice(firsts))
    result = client.put([str(n) for n in numbers], [content(n) for n in numbers])
    stored += result.stored
    if rng.random() < 0.02:
        client.delete([str(n) for n in numbers[4:]])
print(stored, flush=True)
client.close()
""".replace("firsts =", "import select\nfirsts =", 1)
)

READER = (
    COMMON
    + """
hits = asked = 0
buffers = {n: np.empty(SIZES[n % 4] // 8, np.uint64) for n in range(4)}
pools = [[np.empty(SIZES[size] // 8, np.uint64) for _ in range(BATCH)] for size in range(4)]
expected = {}
keys = [client.keys([str(n) for n in range(size, CHUNKS, 4)]) for size in range(4)]
while hits < reads:
    size = rng.randrange(4)
    start = rng.randrange(len(keys[size]) - BATCH)
    pool = pools[size]
    result = client.get(keys[size][start : start + BATCH], pool, timeout_s=0.0)
    asked += BATCH
    for place, hit in enumerate(result.hits):
        if hit:
            number = 4 * (start + place) + size
            if number not in expected:
                expected[number] = content(number)
            if not np.array_equal(pool[place], expected[number]):
                print(json.dumps({"wrong": number, "seed": seed, "got": pool[place][:4].tolist()}), flush=True)
                sys.exit(1)
            hits += 1
print(json.dumps({"hits": hits, "asked": asked}), flush=True)
client.close()
"""
)

NODE = """
import sys
from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.node.node import Node

fields = {"node_id": "n", "cluster": "s", "storage": {
    "arena_nbytes": "24 MiB", "extent_nbytes": "256 KiB", "max_chunks": 1500, "shm_dir": sys.argv[1]}}
node = Node(NodeConfig.load(fields), secret=b"s" * 32, membership=InProcessMembership(member_timeout_s=60.0))
node.start()
print("ready", flush=True)
sys.stdin.read()
print(node.stats()["evicted"], flush=True)
node.stop(unlink=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def stress(shm_dir, seed, reads, count):
    node = start(NODE, shm_dir)
    assert first_line(node) == "ready\n"
    address = f"unix:{shm_dir}/raykv-s-n.sock"
    writer = start(WRITER, address, seed, 0)
    assert first_line(writer) == "writing\n"
    readers = [start(READER, address, seed + number + 1, reads // count) for number in range(count)]
    said = [reader.communicate()[0] for reader in readers]
    stored = writer.communicate("stop\n")[0]
    evicted = node.communicate()[0]
    print(f"{reads} reads: {said}, stored {stored}, evicted {evicted}")
    for reader, words in zip(readers, said, strict=True):
        assert reader.returncode == 0, words
        assert json.loads(words)["hits"] >= reads // count
    assert writer.returncode == node.returncode == 0
    assert int(evicted) > 0
    assert not list(shm_dir.iterdir())


@pytest.mark.slow
def test_no_wrong_byte(shm_dir, seed):
    stress(shm_dir, seed, 10_000, 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_wrong_byte_in_many_reads(shm_dir, seed):
    stress(shm_dir, soak("seed", seed), soak("reads", 1_000_000), 4)
