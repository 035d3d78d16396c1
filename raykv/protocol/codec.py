"""Encodes messages as bytes, and decodes them.

A message is a fixed header and a typed struct in MessagePack. No other format is decoded, and pickle is never used.

    header:  magic "RK" | version u8 | 0 u8 | epoch u32 | request u32 | length u32    then `length` bytes of MessagePack

A view is a list of the cluster's members. `epoch` is the version of the sender's view: a receiver compares versions to
detect that its own view is old. `request` is the number of a request on its connection. The answer to a request has the
same number, so that answers cannot be mixed up.
"""

import struct
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.errors import (
    CapacityError,
    ConfigError,
    LostError,
    NamespaceMismatch,
    PeerUnavailable,
    ProtocolError,
    RayKVError,
    UsageError,
)
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.messages import MAX_KEYS, Answer, Failure, Message, Request, Stats, Unavailable
from raykv.protocol.namespace import Namespace
from raykv.types import Bits, KeyArray

T = TypeVar("T")

VERSION: Final = 8
MAX_MESSAGE_NBYTES: Final = 32 << 20
MAX_ERROR_CHARACTERS: Final = 2000
"""Error texts are cut to this length, because an error text may quote what a peer sent."""
HEADER: Final = struct.Struct("<2sBBIII")
MAGIC: Final = b"RK"
_U32: Final = 0xFFFFFFFF

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Request | Answer] = msgspec.msgpack.Decoder(Request | Answer)
_FAILURES: dict[str, type[RayKVError]] = {
    kind.__name__: kind
    for kind in (UsageError, ConfigError, NamespaceMismatch, CapacityError, LostError, ProtocolError)
}


class Header(NamedTuple):
    """The decoded header of a message whose body has `length` bytes."""

    epoch: int
    length: int
    request_id: int


def encode(message: Message, epoch: int, request_id: int) -> bytes:
    """Encode a message. `epoch` and `request_id` are cut to 32 bits. Raises UsageError if the body is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_NBYTES:
        raise UsageError(f"message of {len(body):,} bytes; at most {MAX_MESSAGE_NBYTES:,}: ask for fewer keys at once")
    return HEADER.pack(MAGIC, VERSION, 0, epoch & _U32, request_id & _U32, len(body)) + body


def decode_header(header: bytes | bytearray | memoryview) -> Header:
    """Decode the HEADER.size bytes of a header.

    Raises:
        ProtocolError: The header is of another protocol or version, or `length` is above MAX_MESSAGE_NBYTES.
    """
    magic, version, _, epoch, request_id, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"not a raykv message (it begins with {bytes(magic)!r})")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, we speak {VERSION}: upgrade the older one")
    if length > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message of {length:,} bytes announced; at most {MAX_MESSAGE_NBYTES:,} are accepted")
    return Header(epoch, length, request_id)


def decode(body: bytes | bytearray | memoryview) -> Request | Answer:
    """Decode the body of a message. Raises ProtocolError if it is not a message of this protocol."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {_short(error)}") from error


# -- values in messages -----------------------------------------------------------------------------------------------


def array(raw: bytes, kind: str, count: int) -> npt.NDArray[Any]:
    """Decode an array of numpy type `kind` from an answer. Raises ProtocolError if it does not have `count` entries."""
    if len(raw) != count * np.dtype(kind).itemsize:
        raise ProtocolError(f"{len(raw)} bytes where {count} entries of {kind} were due")
    return np.frombuffer(raw, kind)


def keys_in(raw: bytes) -> KeyArray:
    """Decode keys from a request. Raises UsageError if the last key is incomplete, or there are more than MAX_KEYS."""
    if len(raw) > MAX_KEYS * KEY_NBYTES:
        raise UsageError(f"{len(raw) // KEY_NBYTES:,} keys in one request; at most {MAX_KEYS:,}: ask in parts")
    return chunk_keys.from_bytes(raw)


def parent_in(raw: bytes) -> KeyArray | None:
    """Decode the key of a parent chunk, shape [1, 2]; None if `raw` is empty. Raises UsageError for a wrong length."""
    if raw and len(raw) != KEY_NBYTES:
        raise UsageError(f"field 'parent': {len(raw)} bytes; a key has {KEY_NBYTES}, and no parent has none")
    return chunk_keys.from_bytes(raw) if raw else None


def numbers_in(raw: bytes, kind: str) -> npt.NDArray[Any]:
    """Decode an array of numpy type `kind` from a request. Raises UsageError if the last element is incomplete."""
    if len(raw) % np.dtype(kind).itemsize:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {kind}")
    return np.frombuffer(raw, kind)


def pack_bits(bits: Bits | None) -> bytes:
    """Encode bits. The result is empty when no bit is set, or when `bits` is None."""
    return np.packbits(bits, bitorder="little").tobytes() if bits is not None and bits.any() else b""


def unpack_bits(raw: bytes, count: int) -> Bits:
    """Decode `count` bits from the output of `pack_bits`. Raises ProtocolError if the length is wrong."""
    if not raw:
        return np.zeros(count, np.bool_)
    if len(raw) != -(-count // 8):
        raise ProtocolError(f"{len(raw)} bytes where {count} bits were due")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count, bitorder="little").astype(np.bool_)


def fields(text: bytes) -> dict[str, Any]:
    """Decode the fields of a namespace or of its config. Raises UsageError unless `text` is a JSON object in UTF-8."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"fields must be a JSON object in UTF-8: {_short(error)}") from error


class _GroupStats(msgspec.Struct):
    config: dict[str, Any]
    get_counts: list[int]
    put_counts: list[int]
    chunks: int = 0
    used_nbytes: int = 0
    reads: int = 0
    requests: int = 0
    served_nbytes: int = 0
    departures: dict[str, int] = {}
    below_nbytes: dict[str, int] = {}
    misses: dict[str, int] = {}


class _TierStats(msgspec.Struct):
    spare_nbytes: int = 0


class _NodeStats(msgspec.Struct):
    arena_nbytes: int
    used_nbytes: int
    lent_nbytes: int
    namespaces: dict[str, _GroupStats]
    tiers: dict[str, _TierStats] = {}


_stats_decoder = msgspec.json.Decoder(_NodeStats)


def stats_in(answer: Answer) -> dict[str, Any]:
    """Decode the counters of a node: see `Node.stats`. Each key of "namespaces" is a namespace as JSON.

    Raises:
        ProtocolError: The answer is of another type, or a part that callers rely on is missing or wrong.
    """
    answer = expect(Stats, answer)
    try:
        for text in _stats_decoder.decode(answer.stats).namespaces:
            Namespace.load(fields(text.encode()))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, UsageError) as error:
        raise ProtocolError(f"not the counters of a node: {_short(error)}") from error
    return fields(answer.stats)


# -- answers ----------------------------------------------------------------------------------------------------------


def expect(kind: type[T], answer: Answer) -> T:
    """Return `answer` if its type is `kind`.

    Raises:
        PeerUnavailable: The answer is Unavailable.
        ProtocolError: The answer has another type.
    """
    if isinstance(answer, Unavailable):
        raise PeerUnavailable(answer.problem)
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(answer).__name__} where {kind.__name__} was due")
    return answer


def failure(error: RayKVError) -> Failure:
    """Make the answer that reports an error to the peer."""
    names = [base.__name__ for base in type(error).__mro__]
    return Failure(next((name for name in names if name in _FAILURES), UsageError.__name__), _short(error))


def raise_failure(answer: Failure) -> None:
    """Raise the error that a Failure reports. An unknown error class becomes ProtocolError."""
    raise _FAILURES.get(answer.kind, ProtocolError)(_short(answer.text))


def _short(error: Exception | str) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + " ..."
