"""LMCache's L1 manager, in the process that uses it."""

import ctypes
import importlib.metadata
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager

from benchmarks.system import Face, MissingError, System
from benchmarks.workloads import MIB, Bytes

COPY_BY_TORCH_NBYTES = 1 * MIB
"""Objects of this size and more are copied by torch, which uses several threads. For smaller ones memmove is faster."""

EVICTED = 4
"""Number of batches that are deleted when there is no space for a new one."""

Buffer = tuple[int, int, torch.Tensor]


class L1(Face):
    """A get or a put has three steps, as in LMCache itself: reserve the objects, copy them, and finish."""

    def __init__(self, manager: L1Manager) -> None:
        self._manager = manager
        self._layouts: dict[int, MemoryLayoutDesc] = {}

    def key(self, name: str) -> ObjectKey:
        return self.key_of(name.encode())

    def key_of(self, raw: bytes) -> ObjectKey:
        return ObjectKey(raw, "m", 0)

    def buffer(self, array: Bytes) -> Buffer:
        return int(array.ctypes.data), len(array), torch.from_numpy(array)

    def get_one(self, key: ObjectKey, into: Buffer) -> None:
        self.get([key], [into])

    def get(self, keys: list[ObjectKey], into: Sequence[Buffer]) -> None:
        reserved = self._manager.reserve_read(keys)
        for key, (address, nbytes, tensor) in zip(keys, into, strict=True):
            found = reserved[key][1]
            if found is None:
                raise MissingError(key)
            if nbytes < COPY_BY_TORCH_NBYTES:
                ctypes.memmove(address, found.data_ptr, nbytes)
            else:
                tensor.copy_(found.tensor)
        self._manager.finish_read(keys)

    def put_one(self, key: ObjectKey, value: Buffer) -> None:
        self.put([key], [value])

    def put(self, keys: list[ObjectKey], values: Sequence[Buffer]) -> None:
        nbytes = values[0][1]
        layout = self._layouts.get(nbytes)
        if layout is None:
            layout = self._layouts[nbytes] = MemoryLayoutDesc([torch.Size([nbytes])], [torch.uint8])
        reserved = self._manager.reserve_write(keys, [False] * len(keys), layout)
        for key, (address, _, tensor) in zip(keys, values, strict=True):
            room = reserved[key][1]
            if room is None:
                raise MissingError(reserved[key][0])
            if nbytes < COPY_BY_TORCH_NBYTES:
                ctypes.memmove(room.data_ptr, address, nbytes)
            else:
                room.tensor.copy_(tensor)
        self._manager.finish_write(keys)

    def exists_one(self, key: ObjectKey) -> None:
        if self._manager.get_object_state(key) is None:
            raise MissingError(key)

    def exists(self, keys: list[ObjectKey]) -> None:
        state = self._manager.get_object_state
        if None in [state(key) for key in keys]:
            raise MissingError

    def delete(self, names: Sequence[str]) -> None:
        done = self._manager.delete([self.key(name) for name in names])
        if set(done.values()) != {L1Error.SUCCESS}:
            raise RuntimeError(f"delete: {set(done.values())}")


class Store(System):
    """One manager, with a pool of DRAM that is allocated at the start.

    `options["small"]`: align objects to 64 bytes instead of 4 KiB, so that the pool holds very many small objects.
    """

    def start(self) -> None:
        aligned = {"align_bytes": 64} if self.setting.options.get("small") else {}
        memory = L1MemoryManagerConfig(self.setting.store_nbytes, False, shm_name="", **aligned)
        self._manager = L1Manager(L1ManagerConfig(memory))
        self._face = L1(self._manager)
        self._written, self._stored = 0, deque[str]()

    def faces(self) -> dict[str, Face]:
        return {"": self._face}

    def about(self) -> dict[str, Any]:
        return {name: importlib.metadata.version(name) for name in ("lmcache", "torch")}

    def special(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Run the writer of the mixed run on a thread of this process, because no other process can write.

        `write` starts the writer and returns at once. `wrote` waits until the writer has ended, and returns its rate.
        """
        if name == "write":
            self._writer = threading.Thread(target=self._write, args=(fields,), daemon=True)
            self._writer.start()
            return {}
        self._writer.join()
        return {"gb_per_s": self._wrote_gb_per_s}

    def _write(self, fields: dict[str, Any]) -> None:
        """Write batches. Delete the oldest ones when the pool is full, because the L1 manager does not evict."""
        nbytes, batch, rate = fields["nbytes"], fields["batch"], fields["rate"]
        values = self._face.buffers([torch.zeros(nbytes, dtype=torch.uint8).numpy()] * batch)
        start_s = time.monotonic()
        done = 0
        while (past_s := time.monotonic() - start_s) < fields["seconds"]:
            if rate and done / rate > past_s:
                time.sleep(done / rate - past_s)
            names = [f"w{self._written + place}" for place in range(batch)]
            try:
                self._face.put(self._face.keys(names), values)
            except MissingError:
                self._face.delete([self._stored.popleft() for _ in range(EVICTED * batch)])
                continue
            self._stored.extend(names)
            self._written += batch
            done += batch
        self._wrote_gb_per_s = done * nbytes / fields["seconds"] / 1e9

    def stop(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()
        super().stop()
