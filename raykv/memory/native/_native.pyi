from collections.abc import Callable, Sequence
from typing import Any

def find(records: Any, index: Any, keys: Any, rows: Any, generations: Any, now: int) -> bool: ...
def enter(records: Any, index: Any, rows: Any) -> int: ...
def read(
    records: Any,
    arena: Any,
    rows: Any,
    generations: Any,
    targets: Sequence[Any],
    hits: Any,
    accessed: Any,
    frequency: Any,
    tick: int,
    stream: bool,
    call: Callable[[object], None] | None,
) -> None: ...
def fill(
    slots: list[Any], values: list[Any], checksums: Any, stream: bool, call: Callable[[object], None] | None
) -> None: ...
def share(job: object, /) -> None: ...
def receive(
    fd: int, ahead: Any, chunks: list[Any], checksums: Any, deadline_s: float, spin_s: float, /
) -> tuple[int, int]: ...
def quickest(nbytes: int) -> tuple[str | None, str | None]: ...
def vectors(most: int, /) -> int: ...

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
        made_at_s: float,
        ticks_per_s: float,
        /,
    ) -> Reader: ...
    def ready(self, key: bytes, /) -> bool: ...
    def read(self, key: bytes, target: Any, stream_nbytes: int, /) -> bool: ...
