"""Imports point one way; files, classes and functions are small; the core needs no extras; public names are fixed."""

import ast
import subprocess
import sys

import pytest

import raykv
from tests import structure
from tests.structure import TOPMOST, imports_of, module_of, package_of, sources

OPTIONAL = ["ray", "torch", "cupy", "pyverbs", "nixl", "vllm", "sglang", "openai", "transformers", "safetensors"]
NEEDS_MORE = ("transport.rdma.", "transport.nixl.")
"""Modules whose names begin so are imported only where pyverbs or NIXL is."""
CORE = [path for path in sources() if package_of(module_of(path)) not in TOPMOST | {"planner"}]


def test_the_structure_holds():
    assert structure.problems() == []


def test_lower_layers_are_not_reached_through_the_public_names():
    assert [path for path in CORE if "raykv" in imports_of(path)] == []


def test_only_config_reads_the_environment():
    readers = {
        module_of(path)
        for path in sources()
        if "env" in path.read_text()  # a file without this word does not read the environment
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"config.environment"}


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
for name in {sorted(module_of(path) for path in CORE)!r}:
    if not name.startswith({NEEDS_MORE!r}):
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
    program = "import raykv.node.node, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    for_later = {"raykv.client.client", "raykv.client.router", "asyncio", "concurrent.futures", "numpy.random"}
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
        "Put",
        "PutResult",
        "RayKVError",
        "Reservation",
        "StorageConfig",
        "Ticket",
        "TlsConfig",
        "TransientError",
        "UsageError",
        "Why",
        "__version__",
        "connect",
        "embedded",
    ]
    assert all(hasattr(raykv, name) for name in raykv.__all__)
