"""The workloads of all stores: objects, sizes and batches. Needs only the standard library and numpy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]
"""Keys of 128 bits, shape [n, 2]."""
Operation = Literal["get", "put", "exists"]

SIZES: Final = (16 * KIB, 64 * KIB, MIB, 4 * MIB)
BATCH: Final = 32
LOOKUP_BATCH: Final = 1000
POOL_NBYTES: Final = 256 * MIB
"""Size of the memory from which objects are cut. It is larger than a last-level cache, so objects are not cached."""
INTO_NBYTES: Final = 128 * MIB
"""Size of the memory into which objects are read. Successive calls use successive parts."""
STORE_NBYTES: Final = 2 * GIB
"""Memory that each store may use, except in the mixed run. It is large enough that nothing is evicted."""
OBJECTS: Final = {16 * KIB: 4096, 64 * KIB: 2048, MIB: 256, 4 * MIB: 64}
"""Number of distinct objects of each size."""
CALLS: Final = {
    1: {16 * KIB: 400, 64 * KIB: 400, MIB: 100, 4 * MIB: 40},
    BATCH: {16 * KIB: 128, 64 * KIB: 64, MIB: 8, 4 * MIB: 3},
}
"""Number of calls in one measurement, by batch and object size."""
LOOKUP_CALLS: Final = {1: 1000, LOOKUP_BATCH: 20}
MANY_LOOKUP_CALLS: Final = 200
FIRST_LOOKUP_CALLS: Final = 20
"""Number of batches in one measurement of lookups among very many keys. The first FIRST_LOOKUP_CALLS batches follow a
pause; a second figure is for them alone."""
LOOKUP_NBYTES: Final = 16
"""Size of each object in the lookups among very many keys."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of call.

    Attributes:
        nbytes: Size of an object; 0 for lookups.
        batch: Number of objects or keys in one call.
    """

    operation: Operation
    nbytes: int
    batch: int

    @property
    def name(self) -> str:
        size = f" {size_text(self.nbytes)}" if self.nbytes else ""
        return f"{self.operation}{size} x{self.batch}"

    @property
    def calls(self) -> int:
        return CALLS[self.batch][self.nbytes] if self.nbytes else LOOKUP_CALLS[self.batch]

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "Workload":
        return cls(fields["operation"], fields["nbytes"], fields["batch"])


def size_text(nbytes: int) -> str:
    """Format a size, such as "16 KiB" or "4 MiB"."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def get(nbytes: int, batch: int = 1) -> Workload:
    return Workload("get", nbytes, batch)


def put(nbytes: int, batch: int = 1) -> Workload:
    return Workload("put", nbytes, batch)


def exists(batch: int = 1) -> Workload:
    return Workload("exists", 0, batch)


ALL: Final = (
    *(get(nbytes, batch) for batch in (1, BATCH) for nbytes in SIZES),
    *(put(nbytes, batch) for batch in (1, BATCH) for nbytes in SIZES),
    exists(),
    exists(LOOKUP_BATCH),
)
QUICK: Final = (
    get(16 * KIB),
    get(64 * KIB),
    get(16 * KIB, BATCH),
    get(MIB, BATCH),
    get(4 * MIB, BATCH),
    put(16 * KIB),
    put(16 * KIB, BATCH),
    put(MIB, BATCH),
    put(4 * MIB, BATCH),
    exists(),
    exists(LOOKUP_BATCH),
)


def fill(pool: Bytes) -> None:
    """Fill the memory with random bytes, which are the same in every process."""
    rng = np.random.default_rng(20_25)
    words = pool.view(np.uint64)
    for start in range(0, len(words), MIB):
        part = words[start : start + MIB]
        part[:] = rng.integers(0, 1 << 64, len(part), np.uint64)


def cut(memory: Bytes, nbytes: int, place: int) -> Bytes:
    """Return part number `place` of size `nbytes`. A number past the last part wraps around to the first part."""
    start = place % (len(memory) // nbytes) * nbytes
    return memory[start : start + nbytes]


def object_name(nbytes: int, number: int) -> str:
    """Return the name of an object that `prepare` stores for the whole phase."""
    return f"g{nbytes}-{number}"


def lookup_keys(rows: int) -> Keys:
    """Return random keys. The same number of rows always gives the same keys."""
    return np.random.default_rng(rows).integers(1, 1 << 64, (rows, 2), np.uint64)


def orders(workload: Workload, round_number: int) -> Iterator[list[int]]:
    """Yield the object numbers of each call. The order is random, equal for all stores, and new in each round."""
    nbytes = workload.nbytes or 16 * KIB
    rng = np.random.default_rng([round_number, nbytes, workload.batch])
    numbers: list[int] = []
    for _ in range(workload.calls):
        while len(numbers) < workload.batch:
            numbers += rng.permutation(OBJECTS[nbytes]).tolist()
        yield numbers[: workload.batch]
        del numbers[: workload.batch]
