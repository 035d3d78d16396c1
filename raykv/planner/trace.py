"""Reads traces. A trace is a list of requests, with the chunks of each request's prompt.

There are three formats. Each has one JSON value per line, plain or gzipped. The first line determines the format.

Mooncake's: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, with
blocks of 512 tokens. The last block of a request may be partial.

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
from typing import Annotated, Any, Final

import msgspec

from raykv.errors import UsageError
from raykv.planner.events import Key, RequestLine, Tokens, decode, requests_of

MOONCAKE_TOKENS: Final = 512
MAX_LINE_NBYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        at_s: Time of arrival in seconds.
        chunks: Numbers of the prompt's chunks, first to last.
        tokens: Length of the prompt in tokens.
        output_tokens: Length of the answer in tokens.
    """

    at_s: float
    chunks: list[int]
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace.

    Attributes:
        name: Name of the trace's file.
        requests: The requests, in order of time.
        chunks: Number of different chunks. They are numbered from 0.
        chunk_tokens: Number of tokens in a full chunk.
    """

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

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Key]


def read_trace(path: Path | str, chunk_tokens: int | None = None) -> Trace:
    """Read a trace from a file.

    Args:
        path: The file.
        chunk_tokens: Number of tokens per chunk, for a trace that does not give this number. None: MOONCAKE_TOKENS.

    Raises:
        UsageError: The file cannot be read, contains no request, or has a wrong line. The message names the line and
            the field.
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
    size: int | None = None
    for line in _request_lines(lines, name, chunk_tokens or MOONCAKE_TOKENS):
        if line.chunk_tokens != (size := size or line.chunk_tokens):
            raise UsageError(
                f"{name}, request {len(requests) + 1}: field 'chunk_tokens': {line.chunk_tokens}, where it was "
                f"{size} before; a trace has chunks of one size"
            )
        chunks = [numbers.setdefault(key, len(numbers)) for key in line.keys]
        requests.append(Request(line.at_s, chunks, line.tokens, line.output_tokens))
    if size is None or not numbers:
        raise UsageError(f"{name}: no request with a chunk in it")
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, requests, len(numbers), size)


def _request_lines(lines: Iterable[bytes | str], name: str, chunk_tokens: int) -> Iterator[RequestLine]:
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
        request, field = decode(form, where, line), "keys"
        if isinstance(request, MooncakeLine):
            field, keys = "hash_ids", request.hash_ids
            request = RequestLine(request.timestamp / 1000, request.input_length, keys, request.output_length)
        size = request.chunk_tokens = request.chunk_tokens or chunk_tokens
        if len(request.keys) > -(-request.tokens // size):
            raise UsageError(
                f"{where}: field '{field}': {len(request.keys)} chunks of {size} tokens are more than "
                f"{request.tokens} tokens have"
            )
        yield request


def _placed(lines: Iterable[bytes | str], name: str) -> Iterator[tuple[str, bytes]]:
    for place, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_NBYTES:
            raise UsageError(f"{name}, line {place}: longer than {MAX_LINE_NBYTES:,} bytes")
        if line.strip():
            yield f"{name}, line {place}", line.encode() if isinstance(line, str) else line


def _form(where: str, line: bytes) -> type[MooncakeLine] | type[RequestLine] | None:
    """Detect the format of a trace from its first line. None means vLLM's KV events."""
    found = decode(Any, where, line)
    if isinstance(found, list) or (isinstance(found, dict) and "events" in found):
        return None
    if isinstance(found, dict) and "hash_ids" in found:
        return MooncakeLine
    if isinstance(found, dict) and "keys" in found:
        return RequestLine
    raise UsageError(
        f"{where}: unknown format: a request has field 'hash_ids' (Mooncake) or 'keys' (raykv), a batch of events has "
        "field 'events' (vLLM)"
    )
