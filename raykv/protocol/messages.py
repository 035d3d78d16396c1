"""Messages and their bytes.

A message is a typed struct in MessagePack behind a fixed header; nothing else is ever decoded, and nothing is
unpickled. Arrays travel as raw little-endian bytes. Some replies are followed by a payload of chunk bytes, whose
length the reply tells.

    header:  magic "RK" | version u8 | 0 u8 | epoch u32 | length u32      then `length` bytes of MessagePack

`epoch` is that of the sender's view, so that every answer tells whether one's own is stale.
"""

import hashlib
import hmac
import struct
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.errors import CapacityError, ConfigError, LostError, NamespaceMismatch, ProtocolError, RayKVError, UsageError
from raykv.protocol.placement import Member, View
from raykv.types import Bits, NodeId

T = TypeVar("T")

VERSION: Final = 3
MAX_MESSAGE_NBYTES: Final = 32 << 20
MAX_KEYS: Final = 1 << 20
MAX_HOLDERS: Final = 3
"""Holders of one key that an owner tells of."""
HEADER: Final = struct.Struct("<2sBBII")
MAGIC: Final = b"RK"

GREETING: Final = struct.Struct("<5sH32s")
"""First bytes of both ends: "raykv", version, nonce."""
GREETING_MAGIC: Final = b"raykv"
PROOF_NBYTES: Final = 32


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """What all messages share."""


# -- requests ---------------------------------------------------------------------------------------------------------


class Attach(Message):
    """Who are you, and where is your memory? Answered by Attached."""


class GetView(Message):
    """Answered by ViewIs."""


class OpenNamespace(Message):
    """Make known the quota group of a namespace (its fields as JSON). Answered by Done."""

    namespace: bytes
    capacity_nbytes: int | None = None


class Reserve(Message):
    """See `Store.reserve`; `group` is a digest. Answered by Granted; the reservation dies with the connection."""

    group: bytes
    keys: bytes
    nbytes: int
    chained: bool = True
    parent: bytes = b""
    depth: int = 0


class Lend(Message):
    """Slots to write chunks of `nbytes` into, before anybody says which: see `Store.lend`. Answered by Lent.

    What is lent dies with the connection; Abort gives it back.
    """

    group: bytes
    nbytes: int
    count: int
    ahead: int = 0
    keys: bytes = b""
    parent: bytes = b""


class Store(Message):
    """Give keys to lent slots and make them visible: see `Store.store`. Answered by Stored.

    `rows` i32 and `checksums` u64 of the slots, `positions` i32 of their keys among `keys`: empty when they are all of
    them. `ahead`: how many slots the writer would like to have for what comes next. `ttl_s`, `priority`: 0 for what the
    namespace's config says.
    """

    group: bytes
    keys: bytes
    nbytes: int
    rows: bytes
    checksums: bytes
    positions: bytes = b""
    chained: bool = True
    parent: bytes = b""
    depth: int = 0
    ahead: int = 0
    ttl_s: float = 0.0
    priority: int = 0


class Commit(Message):
    """Rows i32 and checksums u64 of chunks whose bytes are written. Answered by Done."""

    rows: bytes
    checksums: bytes


class Abort(Message):
    """Rows i32, reserved or lent, to give up. Answered by Done."""

    rows: bytes


class Pin(Message):
    """Answered by Held; the pins die with the connection."""

    keys: bytes


class Unpin(Message):
    """Rows i32. Answered by Done."""

    rows: bytes


class Promote(Message):
    """Bring these into memory from the tiers below it. Answered by Count: how many are on their way, or came.

    `timeout_s`: how long the answer waits for them; they come all the same.
    """

    keys: bytes
    timeout_s: float = 0.0


class Delete(Message):
    """Answered by Count."""

    keys: bytes


class Suspect(Message):
    """These were not to be had from you, or their bytes were wrong: check them, and tell their owners what is true.

    Answered by Count: how many were dropped.
    """

    keys: bytes


class Locate(Message):
    """Who holds these? To their owner. Answered by Located."""

    keys: bytes


class Announce(Message):
    """`node_id` holds these, and no longer holds those. To their owner. Answered by Done.

    `cold`: a bit for each of `added`, set for those that lie below memory; empty when none does.
    """

    node_id: NodeId
    added: bytes = b""
    removed: bytes = b""
    cold: bytes = b""


class Read(Message):
    """Send the bytes of these chunks. Answered by Reading and the payload.

    `locate`: as their owner, say too who holds those that are not here.
    """

    keys: bytes
    locate: bool = False


class Write(Message):
    """Store these chunks of equal size. Answered by Granted; then the payload goes out, answered by Count.

    The payload: the chunks that were granted, and behind them their checksums, u64 each.
    """

    group: bytes
    keys: bytes
    nbytes: int
    chained: bool = True
    parent: bytes = b""
    depth: int = 0
    ttl_s: float = 0.0
    priority: int = 0


class Hint(Message):
    """What a client knows of these: see `Store.hint`. Answered by Count: how many are here."""

    keys: bytes
    ttl_s: float | None = None
    priority: int | None = None
    ended: bool = False
    touch: bool = False
    output_tokens: int | None = None


class Configure(Message):
    """Change these fields (JSON) of the config of a namespace's quota group (its fields as JSON), or drop the quota group.

    Asks the directory. Answered by Configured; whoever asks then tells the others (Adopt), who else hear of it with
    their next heartbeat. `register`: from a node to a relay of the directory: see `DirectoryPort.configure`.
    """

    namespace: bytes
    fields: bytes = b"{}"
    drop: bool = False
    register: bytes | None = None


class Adopt(Message):
    """The newest list of namespaces, as `Configured` gave it. Answered by Count.

    What is counted: the chunks that went from this node when this quota group was dropped last.
    """

    register: bytes
    group: bytes = b""


class Report(Message):
    """What a client saw of an quota group since its last report: see `ClientMetrics`. Answered by Done."""

    group: bytes
    misses: dict[str, int]
    gets: tuple[int, ...] = ()
    puts: tuple[int, ...] = ()


class Why(Message):
    """What do you know of these? Answered by Told."""

    keys: bytes


class GetNamespaces(Message):
    """Which quota groups do you know? Answered by NamespacesAre."""


class Record(Message):
    """Requests that a client looked up, as `record.pack` writes them. Answered by Done."""

    requests: bytes


class TakeRecord(Message):
    """What clients told of their requests (see Record); they go on telling, or not. Answered by Recorded.

    For processes of the node's own host and user alone.
    """

    on: bool


class GetStats(Message):
    """Answered by Stats."""


class Beat(Message):
    """To a relay of the directory: see `DirectoryPort.beat`. Answered by Beaten."""

    member: Member
    view_epoch: int
    view: View | None = None
    version: int = 0
    register: bytes | None = None


class Leave(Message):
    """To a relay of the directory: see `DirectoryPort.leave`. Answered by Done, or Beaten with a problem."""

    node_id: NodeId


# -- replies ----------------------------------------------------------------------------------------------------------


class Done(Message):
    """It is done."""


class Count(Message):
    """How many."""

    count: int


class Attached(Message):
    """Where a node's memory lies; `secret` only goes to processes of the same user on the same host.

    `tiers`: whether it has any below memory, so that what is not in its memory may be promoted.
    """

    node_id: NodeId
    host: str
    incarnation: int
    table: str
    arena: str
    secret: bytes = b""
    tiers: bool = False


class ViewIs(Message):
    """The node's view."""

    view: View


class Granted(Message):
    """positions i32, rows i32, offsets u64: see `Reserved`; and how many keys found no room."""

    positions: bytes
    rows: bytes
    offsets: bytes
    full: int = 0


class Lent(Message):
    """rows i32, offsets u64 of slots: those that were needed first, then those ahead."""

    rows: bytes = b""
    offsets: bytes = b""


class Stored(Message):
    """Places, i32, of the slots that were not used, since others had stored their keys; and the slots lent ahead."""

    unused: bytes = b""
    rows: bytes = b""
    offsets: bytes = b""


class Held(Message):
    """rows i32 (-1: not here), offsets u64, nbytes u32, checksums u64: one entry a key."""

    rows: bytes
    offsets: bytes
    nbytes: bytes
    checksums: bytes


class Located(Message):
    """Place in `choices` of each key's holders (at most MAX_HOLDERS of them), i32; -1 for unknown.

    `cold`: a bit for each key, set for those that no holder has in memory; empty when there are none such.
    """

    choices: tuple[tuple[NodeId, ...], ...]
    places: bytes
    cold: bytes = b""


class Reading(Message):
    """nbytes u32 (0: not here) and checksums u64, one entry a key; the payload is the chunks one after another.

    `choices` and `places`, if they were asked for: as in Located, for those keys that are not here.
    """

    nbytes: bytes
    checksums: bytes
    choices: tuple[tuple[NodeId, ...], ...] = ()
    places: bytes = b""


class Configured(Message):
    """The list of namespaces as it is now (`Register.encode`), and of this node what Adopt answers.

    `problem`: why the directory could not be asked; nothing was changed then.
    """

    register: bytes = b""
    count: int = 0
    problem: str = ""


class Told(Message):
    """One entry a key.

    `places` u8 (`eviction_log.Place`) and `nbytes` u32: where it is on this node; no bytes while it is being written.
    `reasons` u8 (`eviction_log.Reason`), `tiers` u8, `ages_s` f32 and `policy` u8, a place in `policies`: its last departure
    from this node. `announced` u8: whether this node, as its owner, knows of a holder. `remembers_s`: for how long back
    departures are remembered, if any was forgotten.
    """

    places: bytes
    nbytes: bytes
    reasons: bytes
    tiers: bytes
    ages_s: bytes
    policy: bytes
    announced: bytes
    policies: tuple[str, ...] = ()
    remembers_s: float | None = None


class NamespacesAre(Message):
    """What a node says of each quota group, by its fields as JSON: JSON text."""

    namespaces: bytes


class Recorded(Message):
    """Requests as `record.pack` writes them, how many there was no room for, and whether there are more to be taken."""

    requests: bytes
    left_out: int = 0
    more: bool = False


class Beaten(Message):
    """A `Pulse`. `problem`: why the directory could not be asked."""

    view: View | None = None
    tell_view: bool = False
    register: bytes | None = None
    tell_register: bool = False
    problem: str = ""


class Stats(Message):
    """JSON text."""

    stats: bytes


class Failure(Message):
    """The request failed; `kind` names the error class."""

    kind: str
    text: str


Request = (
    Attach | GetView | OpenNamespace | Reserve | Lend | Store | Commit | Abort | Pin | Unpin | Promote | Delete
    | Suspect | Locate | Announce | Read | Write | Hint | Configure | Adopt | Report
    | Why | GetNamespaces | Record | TakeRecord | GetStats | Beat | Leave
)  # fmt: skip
Answer = (
    Done | Count | Attached | ViewIs | Granted | Lent | Stored | Held | Located | Reading | Told
    | Configured | NamespacesAre | Recorded | Beaten | Stats | Failure
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Request | Answer] = msgspec.msgpack.Decoder(Request | Answer)
_FAILURES: dict[str, type[RayKVError]] = {
    kind.__name__: kind
    for kind in (UsageError, ConfigError, NamespaceMismatch, CapacityError, LostError, ProtocolError)
}


def encode(message: Message, epoch: int) -> bytes:
    """Header and body of a message.

    Raises:
        UsageError: It is longer than a message may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_NBYTES:
        raise UsageError(f"message of {len(body):,} bytes; at most {MAX_MESSAGE_NBYTES:,}: ask for fewer keys at once")
    return HEADER.pack(MAGIC, VERSION, 0, epoch & 0xFFFFFFFF, len(body)) + body


def decode_header(header: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(epoch, length of the body).

    Raises:
        ProtocolError: Not our protocol, another version, or a length above the limit.
    """
    magic, version, _, epoch, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"not a raykv message (it begins with {bytes(magic)!r})")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, we speak {VERSION}: upgrade the older one")
    if length > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message of {length:,} bytes announced; at most {MAX_MESSAGE_NBYTES:,} are taken")
    return epoch, length


def decode(body: bytes | bytearray | memoryview) -> Request | Answer:
    """The message in a body.

    Raises:
        ProtocolError: It is none of ours.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that is none of ours: {error}") from error


def array(raw: bytes, kind: str, count: int) -> npt.NDArray[Any]:
    """The array in a field of an answer.

    Raises:
        ProtocolError: It has not `count` entries.
    """
    if len(raw) != count * np.dtype(kind).itemsize:
        raise ProtocolError(f"{len(raw)} bytes where {count} entries of {kind} were due")
    return np.frombuffer(raw, kind)


def pack_bits(bits: Bits | None) -> bytes:
    """Bits as they travel: empty when none is set."""
    return np.packbits(bits, bitorder="little").tobytes() if bits is not None and bits.any() else b""


def unpack_bits(raw: bytes, count: int) -> Bits:
    """The same back.

    Raises:
        ProtocolError: They are not of `count` entries.
    """
    if not raw:
        return np.zeros(count, np.bool_)
    if len(raw) != -(-count // 8):
        raise ProtocolError(f"{len(raw)} bytes where {count} bits were due")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count, bitorder="little").astype(np.bool_)


def fields(text: bytes) -> dict[str, Any]:
    """Fields of a namespace, or of its config, which travel as JSON.

    Raises:
        UsageError: They are none.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UsageError(f"no fields as JSON: {error}") from error


def expect(kind: type[T], answer: Answer) -> T:
    """The answer, which must be of this kind.

    Raises:
        ProtocolError: It is not.
    """
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(answer).__name__} where {kind.__name__} was due")
    return answer


def failure(error: RayKVError) -> Failure:
    """How an error travels."""
    kind = type(error).__name__
    return Failure(kind if kind in _FAILURES else UsageError.__name__, str(error))


def raise_failure(answer: Failure) -> None:
    """Raise at the asking end what went wrong at the other.

    Raises:
        RayKVError: Always; of the class that the failure names.
    """
    raise _FAILURES.get(answer.kind, ProtocolError)(answer.text)


# -- handshake --------------------------------------------------------------------------------------------------------


def greeting(nonce: bytes) -> bytes:
    """First bytes of either end."""
    return GREETING.pack(GREETING_MAGIC, VERSION, nonce)


def read_greeting(raw: bytes | bytearray) -> bytes:
    """The nonce of the other end.

    Raises:
        ProtocolError: The other end does not speak raykv, or another version.
    """
    magic, version, nonce = GREETING.unpack(raw)
    if magic != GREETING_MAGIC:
        raise ProtocolError(f"the peer does not speak raykv (it begins with {bytes(magic)!r})")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, we speak {VERSION}: upgrade the older one")
    return bytes(nonce)


def proof(secret: bytes, role: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What only a holder of the secret can say, once, in this role."""
    return hmac.digest(secret, role.encode() + client_nonce + server_nonce, hashlib.sha256)
