"""Mooncake Store: embedded in the client, in its own process with shared memory, or over TCP as if on another host."""

import ctypes
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mooncake.store
import numpy as np

from benchmarks.system import Face, MissingError, System, answers, free_port
from benchmarks.workloads import INTO_NBYTES, MIB, POOL_NBYTES, Bytes

PACKAGE = Path(mooncake.store.__file__).parent
POOL_SPARE_NBYTES = 64 * MIB
NO_ROOM = -200


class Mooncake(Face):
    """A client. Keys are text. Buffers are addresses in registered memory."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._config = mooncake.store.ReplicateConfig()  # one replica, without soft or hard pin

    def buffer(self, array: Bytes) -> tuple[int, int]:
        return int(array.ctypes.data), len(array)

    def buffers(self, arrays: Sequence[Bytes]) -> tuple[list[int], list[int]]:
        return [int(array.ctypes.data) for array in arrays], [len(array) for array in arrays]

    def get_one(self, key: str, into: tuple[int, int]) -> None:
        if self._store.get_into(key, *into) != into[1]:
            raise MissingError(key)

    def get(self, keys: Sequence[str], into: tuple[list[int], list[int]]) -> None:
        if self._store.batch_get_into(keys, *into) != into[1]:
            raise MissingError

    def put_one(self, key: str, value: tuple[int, int]) -> None:
        code = self._store.put_from(key, *value, self._config)
        if code == NO_ROOM:
            raise MissingError("no room yet: eviction lags behind")
        if code:
            raise RuntimeError(f"put_from: {code}")

    def put(self, keys: Sequence[str], values: tuple[list[int], list[int]]) -> None:
        codes = self._store.batch_put_from(keys, *values, self._config)
        if NO_ROOM in codes:
            raise MissingError("no room yet: eviction lags behind")
        if any(codes):
            raise RuntimeError(f"batch_put_from: {set(codes)}")

    def exists_one(self, key: str) -> None:
        if self._store.is_exist(key) != 1:
            raise MissingError(key)

    def exists(self, keys: Sequence[str]) -> None:
        if set(self._store.batch_is_exist(keys)) != {1}:
            raise MissingError

    def delete(self, names: Sequence[str]) -> None:
        codes = self._store.batch_remove(list(names), True)
        if any(codes):
            raise RuntimeError(f"batch_remove: {set(codes)}")


class Store(System):
    """A store in one of three modes. `options["mode"]`: "embedded", "process" (own process, shared memory) or "tcp".

    With "tcp", `options["pool"]` keeps connections open. In every mode, a separate master process has the metadata.
    """

    def start(self) -> None:
        mode = self.setting.options["mode"]
        os.environ["MC_STORE_MEMCPY"] = "0" if mode == "tcp" else "1"
        os.environ["MC_STORE_CLIENT_METRIC"] = "0"
        if self.setting.options.get("pool"):
            os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
        self.shared = self.setting.shared or self._start_servers(mode)
        master, size = f"127.0.0.1:{self.shared['master']}", self.setting.store_nbytes
        self._store = mooncake.store.MooncakeDistributedStore()
        if mode == "process":
            pool = POOL_NBYTES + INTO_NBYTES + POOL_SPARE_NBYTES
            code = self._store.setup_dummy(pool, 16 * MIB, f"127.0.0.1:{self.shared['client']}")
        else:
            own = size if mode == "embedded" else 0
            code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", own, 16 * MIB, "tcp", "", master)
        if code:
            raise RuntimeError(f"setup: {code}")

    def _start_servers(self, mode: str) -> dict[str, Any]:
        port, size = free_port(), self.setting.store_nbytes
        where = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1"]
        options = ["--rpc_address=127.0.0.1", "--enable_metric_reporting=false", "--eviction_high_watermark_ratio=0.95"]
        environment = {**os.environ, **self.setting.libraries()}
        master = self.server("mooncake-master", [str(PACKAGE / "mooncake_master"), *where, *options], env=environment)
        master.wait_for(lambda: answers(port))
        shared = {"master": port}
        if mode != "embedded":
            client = free_port()
            command = [
                str(PACKAGE / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={client}",
                f"--global_segment_size={size // MIB}MB",
                f"--master_server_address=127.0.0.1:{port}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--threads=2",
            ]
            self.server("mooncake-client", command, env=environment).wait_for(lambda: answers(client))
            shared["client"] = client
        return shared

    def allocate(self, nbytes: int) -> Bytes:
        if self.setting.options["mode"] == "process":
            address = self._store.alloc_from_mem_pool(nbytes)
            if not address:
                raise MemoryError("alloc_from_mem_pool")
            memory: Bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
            memory[:] = 0
        else:
            memory = super().allocate(nbytes)
        code = self._store.register_buffer(int(memory.ctypes.data), nbytes)
        if code:
            raise RuntimeError(f"register_buffer: {code}")
        return memory

    def faces(self) -> dict[str, Face]:
        return {"": Mooncake(self._store)}

    def about(self) -> dict[str, Any]:
        return {"mooncake-transfer-engine-non-cuda": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}

    def stop(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()
        super().stop()
