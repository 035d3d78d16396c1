"""Nothing that arrives on a socket can reach pickle, or other formats and calls that run code."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import imports_of, module_of, sources, tree_of

ROOT = Path(__file__).parents[1]
MODULES = {
    "pickle", "_pickle", "pickletools", "cPickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib",
    "jsonpickle", "yaml", "copyreg", "code", "codeop", "runpy", "xmlrpc", "multiprocessing",
    "concurrent.futures.process",
}  # fmt: skip
"""Modules that unpickle, or that turn text into code or objects of any class."""
CALLS = {"eval", "exec", "compile", "__import__"}
OPTIONS = {"allow_pickle", "ext_hook", "object_hook", "object_pairs_hook"}
LOADS = {"numpy.load", "np.load", "np.lib.format.read_array", "torch.load", "pickle.load", "np.fromregex"}
IMPORTERS = {"", "eviction", "tier.registry", "integrations.vllm", "transport.data_path", "gpu.device"}
"""The modules that import by name: public names of raykv, policies and tiers that the operator allows, a module of
raykv that needs pyverbs, and cupy. No name comes from a message."""


def suspicious(tree: ast.AST) -> Iterator[str]:
    """Yield what could turn bytes into code or into objects of any class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            yield from (f"import of {name}" for name in names if name in MODULES or name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS | LOADS or called.removeprefix("builtins.") in CALLS:
                yield f"call of {called}"
            yield from (f"argument {word.arg}" for word in node.keywords if word.arg in OPTIONS)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads as innocent",
        "import concurrent.futures.process",
        "from concurrent.futures import process",
        "import yaml.constructor",
        "eval(x)",
        "builtins.exec(x)",
        "np.load(file)",
        "numpy.load(file, allow_pickle=True)",
        "msgspec.msgpack.Decoder(ext_hook=f)",
        "json.loads(text, object_hook=f)",
    ],
)
def test_the_check_finds(text: str):
    assert list(suspicious(ast.parse(text)))


def test_no_module_can_turn_bytes_into_code():
    """All of raykv is checked, not only what the sockets' modules import."""
    found = {module_of(path): list(suspicious(tree_of(path))) for path in sources()}
    assert {name: problems for name, problems in found.items() if problems} == {}
    assert {"transport.stream", "protocol.codec", "node.node", "client.client", "membership.proxy"} <= found.keys()


def test_only_policies_and_tiers_are_imported_by_name():
    assert {module_of(path) for path in sources() if "importlib" in imports_of(path)} == IMPORTERS


# -- while it runs ----------------------------------------------------------------------------------------------------

REFUSE = """
import _pickle, pickle, sys, traceback

def refuse(*given, **more):
    with open(LOG, "a") as log:
        traceback.print_stack(file=log)
    raise RuntimeError("pickle is used")

for module in (pickle, _pickle):
    module.load = module.loads = module.Unpickler = refuse
pickle._Unpickler = pickle._load = pickle._loads = refuse
sys.addaudithook(lambda event, given: refuse() if event.startswith("pickle.") else None)
"""
"""The sitecustomize of a process and its children: whoever unpickles leaves a stack in a file."""

ALL_CALLS = """
import asyncio, json, sys, time
from pathlib import Path
import numpy as np
import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig, NodeConfig
from raykv.embedded import InProcessMembership
from raykv.supervisor.handle import NodeHandle

folder, shm = map(Path, sys.argv[1:3])
secret, space = b"s" * 32, raykv.Namespace(model="m", chunk_tokens=4)
storage = {
    "arena_nbytes": "4 MiB", "extent_nbytes": "64 KiB", "shm_dir": str(shm),
    "file": {"path": str(folder), "capacity_nbytes": "64 MiB", "pack_nbytes": "1 MiB", "seal_s": 0.05, "scan_s": 0.05},
}
membership = InProcessMembership(member_timeout_s=5.0)
fields = [{"node_id": name, "cluster": "pk", "host": name, "heartbeat_s": 0.05} for name in "ab"]
for number, each in enumerate(fields):
    ssd = {"paths": [str(folder / each["node_id"])], "capacity_nbytes": "16 MiB", "segment_nbytes": "1 MiB"}
    each["storage"] = {**storage, "ssd": ssd}
nodes = [NodeHandle(NodeConfig.load(each), secret=secret, membership=membership) for each in fields]
names, content = [f"k{number}" for number in range(200)], bytes(range(250)) * 200

def client(number, *, local):
    address = nodes[number].config.local_address if local else nodes[number].stats()["address"]
    return raykv.Client(space, Router(ClientConfig.load({"address": address, "secret": secret.hex()})))

with client(0, local=True) as near, client(1, local=False) as far:
    for each in (near, far):
        for first in range(0, len(names), 10):
            some = names[first : first + 10]
            each.put(some, [content] * len(some))
            each.get(some[:5], [bytearray(len(content)) for _ in some[:5]])
        each.put_many([raykv.Put(each.keys(["x"]), [content])], wait=True)
        each.put_one(each.key("one"), content)
        each.flush()
    nodes[0].record_trace(True)
    hits = 0
    for each in (near, far):
        match = each.match(names[-20:])
        into = [bytearray(len(content)) for _ in range(20)]
        hits += sum(each.get(names[-20:], into, match=match).hits)
        each.get_one(each.key("one"), into[0])
        assert into[0] == content
        each.exists(names), each.exists_one(each.key("one")), each.absent(names), each.locate(names)
        each.why(names[:10]), each.why(tokens=np.arange(16))
        each.ticket(names[:4]), each.match(names[:4], ticket=each.ticket(names[:4]))
        each.stats(), each.namespaces(), each.view()
        keys = each.keys(names[:10])
        each.hint(keys, priority=3), each.touch(keys), each.retain(keys, ttl_s=9.0, priority=2), each.session_end(keys)
        each.configure(ttl_s=600.0, policy="lfu")
        each.delete(names[:3])
    assert hits > 20, hits
    pins = near.pin(names[-3:])
    pins.release()
    reservation = near.reserve(["reserved"], 100)
    reservation.views[0][:] = bytes(100)
    reservation.commit()

    async def later():
        own = raykv.AsyncClient(near)
        return await own.match(names)

    asyncio.run(later())
    assert nodes[0].record_trace(False)
    tiers = nodes[0].stats()["tiers"]
    assert tiers["ssd"]["written_nbytes"] and tiers["file"]["written_nbytes"], tiers
    nodes[0].drain(1e9)
    until_s = time.monotonic() + 20.0
    while nodes[0].stats()["drain"]["state"] != "done":
        assert time.monotonic() < until_s
        time.sleep(0.02)
    far.drop_namespace()
for node in nodes:
    node.stop(unlink=True)
print("all calls done")
"""


def run(program: str, place: Path, *arguments: str) -> "tuple[subprocess.CompletedProcess[str], str]":
    """Run a program in which pickle is refused. Returns its outcome, and the stacks of those that used pickle."""
    log = place / "log"
    (place / "sitecustomize.py").write_text(f"LOG = {str(log)!r}\n{REFUSE}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=place)
    return done, log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    "use", ["pickle.loads(b'I1\\n.')", "_pickle.loads(b'I1\\n.')", "pickle._Unpickler(None)", "pickle.load(None)"]
)
def test_the_refusal_works(tmp_path: Path, use: str):
    done, stacks = run(f"import _pickle, pickle\n{use}", tmp_path)
    assert done.returncode == 1
    assert "refuse" in stacks


@pytest.mark.slow
def test_no_call_of_clients_nodes_and_supervisors_unpickles(tmp_path: Path, shm_dir: Path):
    done, stacks = run(ALL_CALLS, tmp_path, str(tmp_path / "tiers"), str(shm_dir))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all calls done\n"
    assert stacks == ""
