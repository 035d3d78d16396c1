"""OpenAI servers of vLLM with different KV caches. Each has one engine with one thread, and processes of its own."""

import json
import os
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.environments import CACHE, PROGRAMS, ROOT, Environment
from benchmarks.system import Server, answers, free_port

NODE: Final = Path(__file__).parent / "systems" / "raykv_node.py"
HOST: Final = "127.0.0.1"
START_S: Final = 240.0
MIB: Final = 1 << 20
EXTENT_NBYTES: Final = 32 * MIB
"""raykv's default. It uses whole extents only."""
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_STORE_MEMCPY": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What all engines of a run have in common.

    Attributes:
        model: Folder of the model.
        block_tokens: Tokens of a block, and of a chunk of each store.
        step_tokens: Most tokens that an engine computes in one step.
        max_tokens: Most tokens of a request, with its answer.
        cache_tokens: Tokens for which an engine has memory.
        whole_tokens: The same for the engine that holds everything.
        pool_nbytes: Memory of each store.
        token_nbytes: KV of one token.
    """

    model: Path
    block_tokens: int
    step_tokens: int
    max_tokens: int
    cache_tokens: int
    whole_tokens: int
    pool_nbytes: int
    token_nbytes: int


@dataclass(slots=True)
class Store:
    """A store that runs, and what an engine needs to use it.

    Attributes:
        connector: vLLM's `kv_transfer_config`. None: no connector.
        arguments: More arguments of the server.
        variables: Environment variables of the server.
        processes: Numbers of the store's processes.
    """

    connector: dict[str, Any] | None = None
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of KV cache to compare.

    Attributes:
        about: What it is, for people.
        store: Starts its store, during a `with` block.
        environment: Name of the environment; "" for the one of this process.
        holds_all: Whether the engine's own memory holds everything.
    """

    about: str
    store: "Callable[[EngineOptions, Path, Environment], Any]"
    environment: str = ""
    holds_all: bool = False


@contextmanager
def no_store(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    yield Store()


@contextmanager
def nothing_cached(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    yield Store(arguments=["--no-enable-prefix-caching"])


@contextmanager
def raykv_node(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    """A node in a process of its own, without Ray."""
    with raykv_process({"arena_nbytes": options.pool_nbytes}, scratch) as store:
        yield store


@contextmanager
def raykv_ssd(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    """A node with as much memory as the engine, in whole extents, and an SSD tier in the project's folder."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ssd-", dir=CACHE) as folder:
        ssd = {"paths": [folder], "capacity_nbytes": options.pool_nbytes}
        arena_nbytes = -(-options.cache_tokens * options.token_nbytes // EXTENT_NBYTES) * EXTENT_NBYTES
        with raykv_process({"arena_nbytes": arena_nbytes, "ssd": ssd}, scratch) as store:
            yield store


@contextmanager
def raykv_far(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    """A node that counts as one of another host: the engine maps no memory, and all KV goes over TCP."""
    port, secret = free_port(), secrets.token_hex(32)
    storage = {"shm_dir": str(scratch), "arena_nbytes": options.pool_nbytes}
    fields = {"node_id": "n", "cluster": "connectors", "host": "other", "bind": f"{HOST}:{port}", "storage": storage}
    command = [sys.executable, "-P", str(NODE), json.dumps(fields), secret]
    with served("raykv-node", command, scratch, stdin=-1) as server:
        server.wait_for(lambda: answers(port))
        found = connector("RayKVConnector", {"address": f"{HOST}:{port}"}, module="raykv.integrations.vllm")
        yield Store(found, [], {"RAYKV_SECRET": secret}, [server.process.pid])


@contextmanager
def raykv_process(storage: Mapping[str, Any], scratch: Path) -> Iterator[Store]:
    fields = {"node_id": "n", "cluster": "connectors", "storage": {"shm_dir": str(scratch), **storage}}
    address = f"unix:{scratch}/raykv-connectors-n.sock"
    command = [sys.executable, "-P", str(NODE), json.dumps(fields), secrets.token_hex(32)]
    with served("raykv-node", command, scratch, stdin=-1) as server:  # the node serves until its input ends
        server.wait_for(Path(address.removeprefix("unix:")).exists)
        extra = {"address": address}
        yield Store(connector("RayKVConnector", extra, module="raykv.integrations.vllm"), [], {}, [server.process.pid])


@contextmanager
def lmcache_server(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    """LMCache's multiprocess server, with chunks of one block."""
    port, variables = free_port(), {**os.environ, **ENVIRONMENT}
    fields = {
        "port": port,
        "http-port": free_port(),
        "prometheus-port": free_port(),
        "chunk-size": options.block_tokens,
        "l1-size-gb": options.pool_nbytes / (1 << 30),
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",
    }
    flags = [f"--{name}={value}" for name, value in fields.items()]
    command = [str(environment.python.with_name("lmcache")), "server", *flags]
    with served("lmcache-server", command, scratch, env=variables) as server:
        server.wait_for(lambda: answers(port), START_S)
        extra = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port}
        arguments = ["--disable-hybrid-kv-cache-manager"]
        yield Store(connector("LMCacheMPConnector", extra), arguments, {}, [server.process.pid])


@contextmanager
def mooncake_master(options: EngineOptions, scratch: Path, environment: Environment) -> Iterator[Store]:
    """Mooncake's master. The store's memory is in the engine's process, which is Mooncake's default."""
    port, config = free_port(), scratch / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{HOST}:{port}",
                "protocol": "tcp",
                "global_segment_size": options.pool_nbytes,
                "local_buffer_size": 64 * MIB,
            }
        )
    )
    variables = {"LD_LIBRARY_PATH": library_path(), "MOONCAKE_CONFIG_PATH": str(config)}
    master = environment.python.parents[1] / "lib" / "python3.11" / "site-packages" / "mooncake" / "mooncake_master"
    flags = {"rpc_port": port, "rpc_address": HOST, "metrics_port": free_port(), "metrics_host": HOST}
    command = [str(master), *(f"--{name}={value}" for name, value in flags.items()), "--enable_metric_reporting=false"]
    with served("mooncake-master", command, scratch, env={**os.environ, **variables}) as server:
        server.wait_for(lambda: answers(port))
        extra = {"load_async": True}
        yield Store(connector("MooncakeStoreConnector", extra), [], variables, [server.process.pid])


KINDS: Final = {
    "everything": Kind("vLLM's prefix cache, large enough for everything", no_store, holds_all=True),
    "none": Kind("no reuse at all", nothing_cached),
    "vllm": Kind("vLLM's prefix cache alone", no_store),
    "raykv": Kind("RayKVConnector", raykv_node),
    "raykv-far": Kind("RayKVConnector, all chunks on another node", raykv_far),
    "raykv-ssd": Kind("RayKVConnector, most chunks on SSD", raykv_ssd),
    "lmcache": Kind("LMCacheMPConnector 0.5.6", lmcache_server, "connectors-lmcache"),
    "mooncake": Kind("MooncakeStoreConnector 0.3.13", mooncake_master, "connectors-mooncake"),
}


def connector(name: str, extra: Mapping[str, Any], *, module: str | None = None) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`."""
    fields = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }
    return fields | ({"kv_connector_module_path": module} if module else {})


def library_path() -> str:
    """Return LD_LIBRARY_PATH with the unpacked libraries that Mooncake needs."""
    folders = [str(PROGRAMS / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib")]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


@contextmanager
def served(name: str, command: list[str], scratch: Path, **options: Any) -> Iterator[Server]:
    """Run a server process during the `with` block."""
    server = Server(command, scratch / f"{name}.log", cwd=ROOT, **options)
    try:
        yield server
    finally:
        server.stop()


class EngineServer:
    """One engine with its store.

    Attributes:
        name: One of KINDS; the server calls its model so.
        url: Address of the OpenAI server.
    """

    def __init__(self, name: str, port: int, processes: list[int]) -> None:
        self.name, self.url = name, f"http://{HOST}:{port}"
        self._processes = processes

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of all processes of the engine and its store."""
        import psutil

        total = 0.0
        for number in self._processes:
            parent = psutil.Process(number)
            for each in (parent, *parent.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
        return total


@contextmanager
def engine_server(
    name: str, options: EngineOptions, scratch: Path, environments: Mapping[str, Environment]
) -> Iterator[EngineServer]:
    """Run an engine and its store during the `with` block.

    Raises:
        RuntimeError: One of the processes has ended or does not answer. The message has the end of its log.
    """
    kind, port = KINDS[name], free_port()
    environment = environments[kind.environment]
    if environment.problem:
        raise RuntimeError(environment.problem)
    folder = scratch / name
    folder.mkdir()
    with ExitStack() as stack:
        cached = options.whole_tokens if kind.holds_all else options.cache_tokens
        store: Store = stack.enter_context(kind.store(options, folder, environment))
        fields = {
            "model": options.model,
            "served-model-name": name,
            "host": HOST,
            "port": port,
            "dtype": "float32",
            "block-size": options.block_tokens,
            "max-model-len": options.max_tokens,
            "max-num-batched-tokens": options.step_tokens,
            "kv-cache-memory-bytes": options.token_nbytes * cached,
        }
        flags = [text for key, value in fields.items() for text in (f"--{key}", str(value))]
        flags += ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *store.arguments]
        if store.connector:
            flags += ["--kv-transfer-config", json.dumps(store.connector)]
        command = [str(environment.python), "-m", "benchmarks.systems.vllm_server", *flags]
        variables = {**os.environ, **ENVIRONMENT, **store.variables}
        server = stack.enter_context(served("engine", command, folder, env=variables))
        server.wait_for(lambda: is_healthy(port), START_S)
        yield EngineServer(name, port, [server.process.pid, *store.processes])


def is_healthy(port: int) -> bool:
    """Return whether a vLLM server says that it can serve."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
