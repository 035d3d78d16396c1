"""A process that measures one store. It gets requests on standard input.

    python -m benchmarks.worker '{"module": ..., "options": ..., ...}'

Each request is a JSON object on one line, and so is each answer on standard output. The requests are `prepare`,
`measure`, `store_mixed`, `mixed`, `load`, `fill`, `look_up`, `special` and `stop`. The process runs in the store's own
environment, so it imports only the standard library, numpy and the store's module.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks import workloads
from benchmarks.system import Face, MissingError, Setting, System
from benchmarks.workloads import (
    BATCH,
    FIRST_LOOKUP_CALLS,
    INTO_NBYTES,
    KIB,
    LOOKUP_BATCH,
    LOOKUP_CALLS,
    MANY_LOOKUP_CALLS,
    OBJECTS,
    POOL_NBYTES,
    Workload,
    cut,
    object_name,
)

CELL_S = 1.0
"""A measurement stops after this time, but makes at least two calls."""
MIXED_NBYTES = 64 * KIB
MIXED_OBJECTS = 1024
"""Size and number of the objects that the mixed run reads. The writer writes other objects of the same size."""

REFUSED_S = 0.001
"""Pause after a store has refused a put for lack of space."""


class WrongBytesError(Exception):
    """A store returned other bytes than were stored."""


class Worker:
    """The store, and the memory from which objects are stored and into which they are read."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._faces = system.faces()
        self._pool = system.allocate(POOL_NBYTES)
        workloads.fill(self._pool)
        self._into = system.allocate(INTO_NBYTES)
        self._written = 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Store the objects of the given sizes. Return `System.about`, `System.shared` and the names of the faces."""
        face = next(iter(self._faces.values()))
        for nbytes in request["sizes"]:
            for start in range(0, OBJECTS[nbytes], BATCH):
                numbers = range(start, start + BATCH)
                names = face.keys([object_name(nbytes, number) for number in numbers])
                face.put(names, face.buffers([cut(self._pool, nbytes, number) for number in numbers]))
        face.settle()
        return {"about": self._system.about(), "shared": self._system.shared, "faces": list(self._faces)}

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measure one workload on one line. Return its `summary`, or "unsupported" if the line lacks the workload."""
        face, workload = self._faces.get(request["face"]), Workload.parse(request["workload"])
        if face is None or not face.supports(workload):
            return {"unsupported": True}
        measured = {"get": self._get, "put": self._put, "exists": self._exists}[workload.operation]
        return summary(measured(face, workload, request["round"]), workload)

    # -- measurements -----------------------------------------------------------------------------------------------

    def _get(self, face: Face, workload: Workload, number: int) -> list[float]:
        nbytes, batch = workload.nbytes, workload.batch
        orders = list(workloads.orders(workload, number))
        calls = []
        for call, order in enumerate(orders):
            into = [cut(self._into, nbytes, call * batch + place) for place in range(batch)]
            calls.append(self._pack(face, [object_name(nbytes, each) for each in order], into))
        self._into[:: 4 * KIB] ^= 0xFF  # otherwise bytes of earlier measurements could pass the check below
        times = timed(face.get_one if batch == 1 else face.get, calls)
        last = len(times) - 1
        for place in {0, batch // 2, batch - 1}:
            expected = cut(self._pool, nbytes, orders[last][place])
            if not np.array_equal(cut(self._into, nbytes, last * batch + place), expected):
                raise WrongBytesError(f"{workload.name}: wrong bytes")
        return times

    def _put(self, face: Face, workload: Workload, number: int) -> list[float]:
        nbytes, batch = workload.nbytes, workload.batch
        names, calls = [], []
        for call, order in enumerate(workloads.orders(workload, number)):
            names.append([f"p{nbytes}-{call * batch + place}" for place in range(batch)])
            calls.append(self._pack(face, names[-1], [cut(self._pool, nbytes, each) for each in order]))
        times = timed(face.put_one if batch == 1 else face.put, calls)
        face.settle()
        used = names[: len(times)]
        if face.supports(workloads.get(nbytes)):
            into = cut(self._into, nbytes, 0)
            into[:] = 0
            face.get_one(face.key(used[-1][-1]), face.buffer(into))
            expected = cut(self._pool, nbytes, list(workloads.orders(workload, number))[len(times) - 1][-1])
            if not np.array_equal(into, expected):
                raise WrongBytesError(f"{workload.name}: wrong bytes")
        calls.clear()
        face.delete([name for group in used for name in group])
        return times

    def _exists(self, face: Face, workload: Workload, number: int) -> list[float]:
        nbytes = 16 * KIB
        calls = []
        for order in workloads.orders(workload, number):
            names = [object_name(nbytes, each) for each in order]
            calls.append((face.key(names[0]),) if workload.batch == 1 else (face.keys(names),))
        return timed(face.exists_one if workload.batch == 1 else face.exists, calls)

    @staticmethod
    def _pack(face: Face, names: list[str], arrays: list[workloads.Bytes]) -> tuple[Any, ...]:
        if len(names) == 1:
            return face.key(names[0]), face.buffer(arrays[0])
        return face.keys(names), face.buffers(arrays)

    # -- the mixed run ----------------------------------------------------------------------------------------------

    def store_mixed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Store the objects that `mixed` reads."""
        face = self._faces[request["face"]]
        for number in range(MIXED_OBJECTS):
            put_back(face, face.key(f"m-{number}"), face.buffer(cut(self._pool, MIXED_NBYTES, number)))
        face.settle()
        return {"shared": self._system.shared, "about": self._system.about()}

    def mixed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read single objects for `seconds`, after a warm-up of `warm_s` that does not count.

        Evicted objects are stored again outside the measured time, unless `put_back` is false.
        """
        face = self._faces[request["face"]]
        keys = [face.key(f"m-{number}") for number in range(MIXED_OBJECTS)]
        into = [face.buffer(cut(self._into, MIXED_NBYTES, place)) for place in range(INTO_NBYTES // MIXED_NBYTES)]
        order = np.random.default_rng(request["round"]).integers(0, MIXED_OBJECTS, 1 << 16).tolist()
        read, times, misses, call = face.try_get_one, [], 0, 0
        clock = time.perf_counter
        from_s = clock() + request.get("warm_s", 0.0)
        until_s = from_s + request["seconds"]
        while True:
            number, target = order[call % len(order)], into[call % len(into)]
            start_s = clock()
            hit = read(keys[number], target)
            end_s = clock()
            call += 1
            if hit:
                if start_s >= from_s:
                    times.append(end_s - start_s)
            else:
                misses += start_s >= from_s
                if request.get("put_back", True):
                    put_back(face, keys[number], face.buffer(cut(self._pool, MIXED_NBYTES, number)))
            if end_s > until_s:
                break
        if hit:
            expected = cut(self._pool, MIXED_NBYTES, number)
            if not np.array_equal(cut(self._into, MIXED_NBYTES, (call - 1) % len(into)), expected):
                raise WrongBytesError("mixed run: wrong bytes")
        made = quantiles(times)
        return {**made, "misses": misses, "reads_per_s": len(times) / request["seconds"]}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write batches of new objects for `seconds`, at `rate` objects per second; 0 means full speed."""
        face = self._faces[request["face"]]
        start_s = time.perf_counter()
        until_s, written, refused = start_s + request["seconds"], 0, 0
        while (now_s := time.perf_counter()) < until_s:
            early_s = written / request["rate"] - (now_s - start_s) if request["rate"] else 0.0
            if early_s > 0:
                time.sleep(early_s)
            numbers = range(self._written, self._written + BATCH)
            names = [f"w{os.getpid()}-{number}" for number in numbers]
            try:
                face.put(face.keys(names), face.buffers([cut(self._pool, MIXED_NBYTES, number) for number in numbers]))
                written += BATCH
            except MissingError:
                refused += BATCH
                time.sleep(REFUSED_S)
            self._written += BATCH
        per_s = written / request["seconds"]
        return {"objects_per_s": per_s, "gb_per_s": per_s * MIXED_NBYTES / 1e9, "refused": refused}


class Lookups:
    """Lookups in a store with very many small objects. The objects themselves are not read."""

    def __init__(self, system: System) -> None:
        self._system = system

    def fill(self, request: dict[str, Any]) -> dict[str, Any]:
        """Store `rows` objects, or as many as possible in `seconds`."""
        self._keys = workloads.lookup_keys(request["rows"])
        self._face, self._rows = self._system.fill(self._keys, request["seconds"])
        return {"rows": self._rows, "about": self._system.about()}

    def look_up(self, request: dict[str, Any]) -> dict[str, Any]:
        """Look up batches of random keys, and single keys. The store has all these keys."""
        face, rng = self._face, np.random.default_rng(request["round"])
        batches = [self._keys[rng.integers(0, self._rows, LOOKUP_BATCH)] for _ in range(MANY_LOOKUP_CALLS)]
        calls = [(face.keys_of(keys),) for keys in batches]
        first_s = timed(face.exists, calls[:FIRST_LOOKUP_CALLS])
        singles = self._keys[rng.integers(0, self._rows, LOOKUP_CALLS[1])]
        single_s = timed(face.exists_one, [(face.key_of(key.tobytes()),) for key in singles])
        batch_s = first_s + timed(face.exists, calls[FIRST_LOOKUP_CALLS:])
        return {
            "rows": self._rows,
            "keys_per_s": LOOKUP_BATCH / float(np.median(batch_s)),
            "first_keys_per_s": LOOKUP_BATCH / float(np.median(first_s)),
            "single_p50_s": float(np.median(single_s)),
        }


def put_back(face: Face, key: Any, value: Any) -> None:
    """Store an evicted object again. If the store has no space for it, only wait for REFUSED_S."""
    try:
        face.put_one(key, value)
    except MissingError:
        time.sleep(REFUSED_S)


def timed(function: Callable[..., None], calls: list[tuple[Any, ...]]) -> list[float]:
    """Make the calls until CELL_S is over. Return the seconds of each call."""
    times: list[float] = []
    clock, until_s = time.perf_counter, time.perf_counter() + CELL_S
    gc.collect()
    gc.disable()
    try:
        for arguments in calls:
            start_s = clock()
            function(*arguments)
            end_s = clock()
            times.append(end_s - start_s)
            if end_s > until_s and len(times) > 1:
                break
    finally:
        gc.enable()
    return times


def quantiles(times: list[float]) -> dict[str, Any]:
    """Return the number of calls, and the median, tail and mean of the seconds in `times`."""
    if not times:
        return {"calls": 0, "p50_s": None, "p99_s": None, "p999_s": None, "mean_s": None}
    p50, p99, p999 = np.quantile(times, (0.5, 0.99, 0.999)).tolist()
    return {"calls": len(times), "p50_s": p50, "p99_s": p99, "p999_s": p999, "mean_s": float(np.mean(times))}


def summary(times: list[float], workload: Workload) -> dict[str, Any]:
    """Return the quantiles, and the throughput at the median time of a call."""
    made = quantiles(times)
    per_s = workload.batch / made["p50_s"]
    return {**made, "objects_per_s": per_s, "gb_per_s": per_s * workload.nbytes / 1e9}


def serve(system: System, requests: TextIO, answers: TextIO) -> None:
    """Start the store, then answer requests until `stop` or the end of the input."""
    system.start()
    worker: Worker | None = None
    lookups = Lookups(system)
    handlers = ("prepare", "measure", "mixed", "store_mixed", "load", "fill", "look_up", "special")
    for line in requests:
        request = json.loads(line)
        if request["do"] == "stop":
            return
        assert request["do"] in handlers
        try:
            if request["do"] == "special":
                answer = system.special(request["name"], request)
            elif request["do"] in ("fill", "look_up"):
                answer = getattr(lookups, request["do"])(request)
            else:
                worker = worker or Worker(system)
                answer = getattr(worker, request["do"])(request)
        except Exception as error:  # noqa: BLE001  the table shows the failure, and the run goes on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}", "wrong_bytes": isinstance(error, WrongBytesError)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> int:
    """Read the settings from the command line, and serve."""
    fields = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of client libraries goes to stderr, because it is not an answer
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    setting = Setting(
        options=fields["options"],
        store_nbytes=fields["store_nbytes"],
        scratch=Path(fields["scratch"]),
        shm=Path(fields["shm"]),
        programs=Path(fields["programs"]),
        shared=fields.get("shared"),
    )
    module = importlib.import_module(f"benchmarks.systems.{fields['module']}")
    system: System = module.Store(setting)
    try:
        serve(system, sys.stdin, answers)
    finally:
        system.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
