from collections.abc import Callable, Sequence
from typing import Any

def find(records: Any, index: Any, keys: Any, rows: Any, generations: Any, now: int) -> None: ...
def look(
    records: Any,
    index: Any,
    other_index: Any,
    active: Any,
    side: Any,
    counts: Any,
    keys: Any,
    rows: Any,
    generations: Any,
    now: int,
) -> None: ...
def enter(records: Any, index: Any, rows: Any) -> int: ...
def check(
    records: Any, parent: Any, namespace: Any, slots: Any, known: Any, taken: Any, rows: int, extent_nbytes: int
) -> int: ...
def sort_out(records: Any, parent: Any, ready: Any, unfinished: Any, published: Any) -> tuple[int, int, int]: ...
def survey(index: Any, rows: int, ready: Any) -> int: ...
def chain(parent: Any, children: Any, ready: Any) -> None: ...
def note_slots(row_at: Any, slots: Any, pages: Any, rows: Any, used: Any, fresh: Any) -> None: ...
def add_up(records: Any, namespace: Any, rows: Any, used_nbytes: Any) -> bool: ...
def hold(
    records: Any,
    index: Any,
    keys: Any,
    now: int,
    most: int,
    pins: Any,
    checksum: Any,
    accessed: Any,
    frequency: Any,
    arena: memoryview,
    /,
) -> tuple[list[int], list[memoryview], bytes, bytes] | None: ...
def wrap(many: Sequence[Any], writable: bool, /) -> tuple[list[list[memoryview]], list[int]] | None: ...
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
    fd: int, ahead: Any, chunks: list[Any], checksums: Any, deadline_s: float, watch_s: float, /
) -> tuple[int, int, bool]: ...
def copy(target: Any, source: Any, stream: bool) -> None: ...
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
    def known(self, key: bytes, /) -> bool: ...
    def read(self, key: bytes, target: Any, stream_nbytes: int, /) -> bool: ...
    def store(
        self, row: int, generation: int, start: int, key: bytes, pieces: Any, stream_nbytes: int, /
    ) -> tuple[bool, bytes]: ...
    def publish(self, rows: list[int], generations: list[int], keys: Any, checksums: Any, nbytes: int, /) -> bytes: ...
    def settle(
        self, rows: Any, keys: Any, limit: int, nbytes: int, group: int, chained: bool, parent: int, depth: int, /
    ) -> int: ...
