from collections.abc import Sequence
from typing import Any

def find(records: Any, index: Any, keys: Any, rows: Any, generations: Any, now: int) -> None: ...
def enter(records: Any, index: Any, rows: Any) -> int: ...
def read(
    records: Any,
    arena: Any,
    rows: Any,
    generations: Any,
    targets: Sequence[Any],
    first: int,
    end: int,
    hits: Any,
    accessed: Any,
    frequency: Any,
    tick: int,
    stream: bool,
) -> None: ...
def fill(slots: list[Any], values: list[Any], first: int, end: int, checksums: Any, stream: bool) -> None: ...
def copy(target: Any, source: Any, stream: bool) -> None: ...

class Reader:
    def __new__(
        cls,
        records: Any,
        index: Any,
        other_index: Any,
        active: Any,
        arena: Any,
        accessed: Any,
        frequency: Any,
        inserted: Any,
        checksum: Any,
        depth: Any,
        parent: Any,
        children: Any,
        namespace: Any,
        side: Any,
        counts: Any,
        made_at_s: float,
        ticks_per_s: float,
        /,
    ) -> Reader: ...
    def ready(self, key: bytes, /) -> bool: ...
    def read(self, key: bytes, target: Any, stream_nbytes: int, /) -> bool: ...
    def publish(self, rows: list[int], generations: list[int], keys: Any, checksums: Any, nbytes: int, /) -> bytes: ...
    def settle(
        self, rows: Any, keys: Any, limit: int, nbytes: int, account: int, chained: bool, parent: int, depth: int, /
    ) -> int: ...
