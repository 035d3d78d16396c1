"""After a connected process forks, parent and child use separate connections."""

import os
import random
import subprocess
import sys

import pytest

from tests.support.nodes import SECRET, node_process

PROGRAM = """
import hashlib, os, random, sys, threading
import raykv

address, secret, action, seed = sys.argv[1:]
rng = random.Random(int(seed))
client = raykv.connect(raykv.Namespace(model="m"), address=address, secret=secret, timeout_s=20.0)
NBYTES = 50_000

def content(name):
    return hashlib.shake_128(name.encode()).digest(NBYTES)

def put(name):
    wait = rng.random() < 0.5
    result = client.put([name], [content(name)], wait=wait, chained=False)
    assert result.skipped == 0, result

def check(names):
    hits = 0
    into = [bytearray(NBYTES) for _ in names]
    for name, hit, chunk in zip(names, client.get(names, into).hits, into, strict=True):
        assert not hit or chunk == content(name), f"wrong bytes of {name} in {os.getpid()}"
        hits += hit
    return hits

def several(count, who):
    names = [f"{who}-{number}" for number in range(count)]
    for name in names:
        put(name)
    done = client.flush()
    assert done.skipped == done.posted == 0, done
    return names

mine = several(60, "before")
for number in range(4):
    client.put([f"posted-{number}"], [content(f"posted-{number}")], wait=False)
child = os.fork()
who = "parent" if child else "child"
rng.seed(f"{seed} {who}")
if action == "close" and not child:
    client.close()
    os._exit(0)
if action == "close":
    assert os.waitpid(child, 0)[1] == 0
if action == "read":
    for _ in range(300):
        some = rng.sample(mine, rng.randint(1, 5))
        assert check(some) == len(some)
else:
    mine += several(10, who)
    assert check(mine) == len(mine)
if child:
    if action != "close":
        assert os.waitpid(child, 0)[1] == 0
        others = [f"child-{number}" for number in range(10)] if action == "put" else []
        assert check([*mine, *others]) == len(mine) + len(others)
    assert client.flush().skipped == 0
    client.close()
    print("fine")
else:
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("action", "local"), [("put", True), ("close", True), ("read", True), ("read", False)])
def test_parent_and_child_read_and_write_right_bytes(shm_dir, action: str, local: bool, rng: random.Random):
    with node_process(shm_dir) as node:
        if not local:
            node.fields["host"] = "elsewhere"
        address = node.local_address if local else node.address
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", PROGRAM, address, SECRET, action, str(rng.randrange(1 << 30))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "fine\n"
