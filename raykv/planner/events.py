"""Converts vLLM's KV events into requests.

A line is a batch, as an object (`{"ts": ..., "events": [...]}`) or as vLLM sends it (`[ts, [...], rank]`). An event is
an object (`{"type": "BlockStored", ...}`) or an array (`["BlockStored", hashes, parent, token_ids, block_size, ...]`).

Events name only new blocks. We assume that the same request also read all blocks before them in the chain. A request
whose blocks were all cached causes no event, so the trace has fewer hits than the engine had.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec

from raykv.errors import UsageError

CONTINUES_S: Final = 2.0
"""Blocks that extend a request's chain within this time belong to the same request: its prefill still runs."""

Key = Annotated[int, msgspec.Meta(ge=-(1 << 63))] | Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Found = TypeVar("Found")


@dataclass(slots=True)
class Raw:
    at_s: float
    keys: list[int | str]
    tokens: int
    output_tokens: int
    chunk_tokens: int


class EventLine(msgspec.Struct):
    ts: Seconds
    events: list[Any]


class BlockStored(msgspec.Struct):
    block_hashes: list[Key]
    parent_block_hash: Key | None
    token_ids: list[Any]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


_OTHERS: Final = ("BlockRemoved", "AllBlocksCleared")


def requests_of(lines: Iterable[tuple[str, bytes]]) -> Iterator[Raw]:
    """Make requests from (place, line) pairs. Raises UsageError: A line is wrong. Names the line and the field."""
    before: dict[int | str, int | str | None] = {}
    growing: dict[int | str, tuple[Raw, float]] = {}  # last block of a request -> (the request, the block's time)
    requests: list[Raw] = []
    for where, line in lines:
        for at_s, event in _stored(where, line):
            keys, size = event.block_hashes, event.block_size
            if not keys:
                continue
            before.update(zip(keys, [event.parent_block_hash, *keys[:-1]], strict=True))
            raw, last_s = growing.pop(event.parent_block_hash, (None, 0.0)) if event.parent_block_hash else (None, 0.0)
            if raw is None or at_s > last_s + CONTINUES_S:
                raw = Raw(at_s, _chain(event.parent_block_hash, before), 0, 0, size)
                requests.append(raw)
            raw.keys += keys
            raw.tokens = size * len(raw.keys)
            growing[keys[-1]] = raw, at_s
    yield from requests


def _chain(last: int | str | None, before: dict[int | str, int | str | None]) -> list[int | str]:
    """Return the known chain of blocks that ends with block `last`."""
    chain: dict[int | str, None] = {}
    while last is not None and last not in chain:
        chain[last] = None
        last = before.get(last)
    return list(reversed(chain))


def _stored(where: str, line: bytes) -> Iterator[tuple[float, BlockStored]]:
    found: Any = decode(Any, where, line)
    if isinstance(found, list):
        found = dict(zip(EventLine.__struct_fields__, found, strict=False))
    batch = _convert(EventLine, where, "", found)
    for place, event in enumerate(batch.events):
        field = f"events[{place}]"
        kind: Any = None
        fields: Any = event
        if isinstance(event, dict):
            kind = event.get("type")
        elif isinstance(event, list) and event:
            kind, fields = event[0], dict(zip(BlockStored.__struct_fields__, event[1:], strict=False))
        if kind == "BlockStored":
            yield batch.ts, _convert(BlockStored, where, f"{field}.", fields)
        elif kind not in _OTHERS:
            raise UsageError(f"{where}: field '{field}': not an event of vLLM: {str(kind)[:40]!r}")


def _convert(form: type[Found], where: str, prefix: str, found: Any) -> Found:
    try:
        return msgspec.convert(found, form)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {explain(error, prefix)}") from error


def decode(form: type[Found], where: str, line: bytes) -> Found:
    """Decode a line of JSON. Raises UsageError: The line does not have this form. Names the line and the field."""
    try:
        return msgspec.json.decode(line, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: {explain(error)}") from error


def explain(error: Exception, prefix: str = "") -> str:
    text = str(error)
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text) or re.fullmatch(
        r"(Object missing required field) `(.*)`", text
    )
    return f"field '{prefix}{found[2]}': {found[1]}" if found else text
