"""Converts vLLM's KV events into requests.

Each line is a batch of events, in one of two forms:

    {"ts": ..., "events": [...]}
    [ts, [...], rank]                   as vLLM sends it

Each event has one of two forms:

    {"type": "BlockStored", ...}
    ["BlockStored", hashes, parent, token_ids, block_size, ...]

An event names only blocks that a request has newly stored. We assume that this request read all earlier blocks of the
chain. A request whose blocks were all cached causes no event, so the trace has fewer hits than the engine had.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec

from raykv.errors import UsageError

CONTINUES_S: Final = 2.0
"""Blocks that extend a request's chain within this many seconds belong to the same request, because the prefill of the
request may still be running."""

Key = Annotated[int, msgspec.Meta(ge=-(1 << 63))] | Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
ChunkTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Found = TypeVar("Found")


class RequestLine(msgspec.Struct):
    """A line of raykv's own format. Lines of the other formats are converted to this type."""

    at_s: Seconds
    tokens: Tokens
    keys: list[Key]
    output_tokens: Tokens = 0
    chunk_tokens: ChunkTokens | None = None


class EventLine(msgspec.Struct):
    ts: Seconds
    events: list[Any]


class BlockStored(msgspec.Struct):
    block_hashes: list[Key]
    parent_block_hash: Key | None
    token_ids: list[Any]
    block_size: ChunkTokens


_OTHERS: Final = ("BlockRemoved", "AllBlocksCleared")


def requests_of(lines: Iterable[tuple[str, bytes]]) -> list[RequestLine]:
    """Convert lines of events to requests.

    Args:
        lines: For each line, its place in the file (for error messages), and its text.

    Raises:
        UsageError: A line is wrong. The message names its place and the field.
    """
    before: dict[int | str, int | str | None] = {}  # maps a block to the block before it in the chain
    growing: dict[int | str, tuple[RequestLine, float]] = {}  # maps a request's last block to (request, block's time)
    requests: list[RequestLine] = []
    for where, line in lines:
        for at_s, event in _stored(where, line):
            keys, size = event.block_hashes, event.block_size
            if not keys:
                continue
            before.update(zip(keys, [event.parent_block_hash, *keys[:-1]], strict=True))
            parent = event.parent_block_hash
            request, last_s = (None if parent is None else growing.pop(parent, None)) or (None, 0.0)
            if request is None or at_s > last_s + CONTINUES_S:
                request = RequestLine(at_s, 0, _chain(parent, before), chunk_tokens=size)
                requests.append(request)
            request.keys += keys
            request.tokens = size * len(request.keys)
            growing[keys[-1]] = request, at_s
    return requests


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
    """Decode a line of JSON into the type `form`. A wrong line raises UsageError, which names line and field."""
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
