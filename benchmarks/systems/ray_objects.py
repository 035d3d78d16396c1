"""Ray's object store. A put stores an array. A get returns a view in shared memory, which this client copies."""

import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from benchmarks.system import Face, System
from benchmarks.workloads import Bytes, Workload


class Objects(Face):
    """Keeps a reference to each object, by name. Ray frees an object when its reference is deleted."""

    def __init__(self) -> None:
        self._references: dict[str, Any] = {}

    def supports(self, workload: Workload) -> bool:
        return workload.operation != "exists"

    def key(self, name: str) -> str:
        return name

    def buffer(self, array: Bytes) -> Bytes:
        return array

    def get_one(self, key: str, into: Bytes) -> None:
        np.copyto(into, ray.get(self._references[key]))

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        references = self._references
        for target, found in zip(into, ray.get([references[key] for key in keys]), strict=True):
            np.copyto(target, found)

    def put_one(self, key: str, value: Bytes) -> None:
        self._references[key] = ray.put(value)

    def put(self, keys: Sequence[str], values: Sequence[Bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._references[key] = ray.put(value)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            del self._references[name]


class Store(System):
    """A Ray cluster of one node, with its own temporary directory."""

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rb")  # short, because socket paths have a maximum length
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=self.setting.store_nbytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=self._folder,
        )

    def faces(self) -> dict[str, Face]:
        return {"": Objects()}

    def about(self) -> dict[str, Any]:
        return {"ray": ray.__version__}

    def stop(self) -> None:
        ray.shutdown()
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)
        super().stop()
