"""Imports point one way; the core is light; its public names are these."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import raykv

ROOT = Path(raykv.__file__).parent
LAYERS = [
    "errors",
    "types",
    "config",
    "namespace",
    "keys",
    "ring",
    "record",
    "wire",
    "memory",
    "memory.native",
    "memory.pages",
    "memory.host",
    "memory.arena",
    "memory.numa",
    "memory.copying",
    "memory.table",
    "memory.rows",
    "memory.recovery",
    "memory.slots",
    "eviction.base",
    "eviction.memory",
    "eviction.order",
    "eviction.supplied",
    "eviction",
    "eviction.fifo",
    "eviction.lru",
    "eviction.leaf_lru",
    "eviction.lfu",
    "eviction.ttl",
    "eviction.arc",
    "eviction.s3fifo",
    "eviction.hazards",
    "eviction.density",
    "eviction.policies",
    "tier",
    "tier.admission",
    "ledger",
    "marks",
    "accounts",
    "room",
    "shard",
    "tiers",
    "sweep",
    "transport",
    "transport.base",
    "transport.stream",
    "transport.shm",
    "transport.memory",
    "transport.tcp",
    "transport.peers",
    "locator",
    "hotness",
    "register",
    "tally",
    "directory",
    "namespaces",
    "relay",
    "node",
    "keeper",
    "kept",
    "load",
    "loan",
    "leases",
    "local",
    "troubles",
    "reach",
    "why",
    "steer",
    "handoff",
    "client",
    "aio",
    "embedded",
    "",  # raykv itself: the public names
    "cluster",
    "integrations",
    "doctor",
    "plan.events",
    "plan.trace",
    "plan.model",
    "plan.ssd",
    "plan.cache",
    "plan.replay",
    "plan.belady",
    "plan.records",
    "plan.plot",
    "plan.command",
    "plan",
    "commands",
    "cli",
]
OPTIONAL = ["ray", "torch", "cupy", "pyverbs", "vllm", "sglang", "openai", "transformers", "safetensors"]
SOURCES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """Name within raykv, such as "memory.table"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in SOURCES}


def layer_of(module: str) -> int:
    """Place of the longest name in LAYERS that the module is or lies under."""
    while module not in LAYERS:
        assert module, "not in LAYERS: say where this module stands"
        module = module.rpartition(".")[0]
    return LAYERS.index(module)


@cache
def imports_of(path: Path) -> set[str]:
    """Modules of raykv that a file imports anywhere, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("raykv.")
                found.add(f"raykv.{inner}" if inner in MODULES else str(node.module))
    return {name.removeprefix("raykv").removeprefix(".") for name in found if name.split(".")[0] == "raykv"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_of(path) or "raykv")
def test_imports_point_one_way(path):
    module = module_of(path)
    mine = layer_of(module)
    for imported in imports_of(path):
        if (module, imported) == ("", "cluster"):
            continue  # `raykv.connect` looks for a cluster on Ray, inside the call, if Ray is in use at all
        inside_one_part = layer_of(imported) == mine and LAYERS[mine] in ("cluster", "integrations", "tier")
        assert layer_of(imported) < mine or inside_one_part, f"raykv.{module} must not import raykv.{imported}"


def test_lower_layers_are_not_reached_through_the_public_names():
    core = [path for path in SOURCES if layer_of(module_of(path)) < LAYERS.index("")]
    assert [path for path in core if "" in imports_of(path)] == []


def test_only_config_reads_the_environment():
    readers = {
        module_of(path)
        for path in SOURCES
        if "env" in path.read_text()  # spares parsing the others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"config"}


@pytest.mark.slow
def test_the_core_works_with_nothing_optional_installed():
    program = f"""
import sys
from importlib import import_module

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ImportError(name + " is optional")

sys.meta_path.insert(0, Refuse())
import raykv
for name in {sorted(m for m in MODULES if m and layer_of(m) < LAYERS.index(""))!r}:
    import_module("raykv." + name)
with raykv.embedded(2, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as cluster:
    client = cluster.client(raykv.Namespace(model="m"))
    assert client.put(["a"], [b"bytes"]).stored == 1
    assert client.get(["a"], [bytearray(5)]).hits == (True,)
assert not set(sys.modules) & set({OPTIONAL!r})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_node_starts_without_what_can_come_later():
    program = "import raykv.node, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    for_later = {"raykv.client", "raykv.reach", "asyncio", "concurrent.futures", "numpy.random"}
    assert not set(done.stdout.split()) & for_later


def test_the_public_names():
    assert raykv.__all__ == [
        "AsyncClient",
        "CapacityError",
        "Client",
        "ClientConfig",
        "ClusterConfig",
        "ConfigError",
        "EmbeddedCluster",
        "GetResult",
        "LostError",
        "Match",
        "Namespace",
        "NamespaceConfig",
        "NamespaceMismatch",
        "NodeConfig",
        "PeerUnavailable",
        "Pins",
        "ProtocolError",
        "PutResult",
        "RayKVError",
        "Reservation",
        "StorageConfig",
        "Ticket",
        "TransientError",
        "UsageError",
        "Why",
        "__version__",
        "connect",
        "embedded",
    ]
    assert all(hasattr(raykv, name) for name in raykv.__all__)
