"""Reads traces: requests, and the chunks of each request's prompt.

There are three formats. Each has one JSON value per line, plain or gzipped. The first line determines the format.

Mooncake's: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, blocks of 512
tokens; the last one may be partial.

Raykv's: `{"at_s": 12.5, "tokens": 1300, "output_tokens": 20, "chunk_tokens": 512, "keys": ["9f0c...", ...]}`. A key is
a string or a number. `output_tokens` and `chunk_tokens` are optional.

vLLM's KV events: see `raykv.planner.events`.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec

from raykv.errors import UsageError
from raykv.planner.events import Key, Raw, Seconds, decode, requests_of

MOONCAKE_TOKENS: Final = 512
MAX_LINE_NBYTES: Final = 64 << 20

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its arrival, the numbers of its chunks (first to last), and the tokens of prompt and answer."""

    at_s: float
    chunks: list[int]
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `chunks` is the number of different chunks, which are numbered from 0."""

    name: str
    requests: list[Request]
    chunks: int
    chunk_tokens: int

    @property
    def accesses(self) -> int:
        return sum(len(request.chunks) for request in self.requests)

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s

    def tokens_of(self, request: Request) -> list[int]:
        """Return the number of tokens in each chunk of a request. Only the last chunk may be partial."""
        size = self.chunk_tokens
        return [min(size, max(0, request.tokens - at * size)) for at in range(len(request.chunks))]


class MooncakeLine(msgspec.Struct):
    """A line of Mooncake's format. The timestamp is in milliseconds."""

    keys_field: ClassVar[str] = "hash_ids"
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Key]

    def raw(self, chunk_tokens: int) -> Raw:
        return Raw(self.timestamp / 1000, self.hash_ids, self.input_length, self.output_length, chunk_tokens)


class RecordedLine(msgspec.Struct):
    keys_field: ClassVar[str] = "keys"
    at_s: Seconds
    tokens: _Tokens
    keys: list[Key]
    output_tokens: _Tokens = 0
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None

    def raw(self, chunk_tokens: int) -> Raw:
        return Raw(self.at_s, self.keys, self.tokens, self.output_tokens, self.chunk_tokens or chunk_tokens)


def read_trace(path: Path | str, chunk_tokens: int | None = None) -> Trace:
    """Read a trace from a file.

    `chunk_tokens` applies if the trace does not contain it; None means MOONCAKE_TOKENS. Raises UsageError: The file
    cannot be read, contains no request, or has a wrong line. Names the line and the field.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            return parse_trace(iter(lambda: file.readline(MAX_LINE_NBYTES + 1), b""), path.name, chunk_tokens)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: {error}") from error


def parse_trace(lines: Iterable[bytes | str], name: str = "trace", chunk_tokens: int | None = None) -> Trace:
    numbers: dict[int | str, int] = {}
    requests: list[Request] = []
    size = 0
    for raw in _raw(lines, name, chunk_tokens or MOONCAKE_TOKENS):
        if raw.chunk_tokens != (size := size or raw.chunk_tokens):
            raise UsageError(
                f"{name}, request {len(requests) + 1}: field 'chunk_tokens': {raw.chunk_tokens}, where it was "
                f"{size} before; a trace has chunks of one size"
            )
        chunks = [numbers.setdefault(key, len(numbers)) for key in raw.keys]
        requests.append(Request(raw.at_s, chunks, raw.tokens, raw.output_tokens))
    if not numbers:
        raise UsageError(f"{name}: no request with a chunk in it")
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, requests, len(numbers), size)


def _raw(lines: Iterable[bytes | str], name: str, chunk_tokens: int) -> Iterator[Raw]:
    placed = _placed(lines, name)
    first = next(placed, None)
    if first is None:
        return
    placed = chain([first], placed)
    form = _form(*first)
    if form is None:
        yield from requests_of(placed)
        return
    for where, line in placed:
        raw = decode(form, where, line).raw(chunk_tokens)
        if len(raw.keys) > -(-raw.tokens // raw.chunk_tokens):
            raise UsageError(
                f"{where}: field '{form.keys_field}': {len(raw.keys)} chunks of {raw.chunk_tokens} tokens are "
                f"more than {raw.tokens} tokens have"
            )
        yield raw


def _placed(lines: Iterable[bytes | str], name: str) -> Iterator[tuple[str, bytes]]:
    for place, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_NBYTES:
            raise UsageError(f"{name}, line {place}: longer than {MAX_LINE_NBYTES:,} bytes")
        if line.strip():
            yield f"{name}, line {place}", line.encode() if isinstance(line, str) else line


def _form(where: str, line: bytes) -> type[MooncakeLine] | type[RecordedLine] | None:
    """Detect the format of a trace by its first line. None means vLLM's KV events."""
    found = decode(Any, where, line)
    if isinstance(found, list) or (isinstance(found, dict) and "events" in found):
        return None
    if isinstance(found, dict) and "hash_ids" in found:
        return MooncakeLine
    if isinstance(found, dict) and "keys" in found:
        return RecordedLine
    raise UsageError(
        f"{where}: unknown format: a request has field 'hash_ids' (Mooncake) or 'keys' (raykv), a batch of events has "
        "field 'events' (vLLM)"
    )
