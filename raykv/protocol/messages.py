"""The messages of the protocol: requests, and the answers to them. `raykv.protocol.codec` turns them into bytes.

Arrays are raw little-endian bytes; their element types stand in the docstrings (i32, u64, ...). Keys are 16 bytes each,
as `chunk_keys.to_bytes` writes them. Some answers are followed by a payload of chunk bytes.

A lease is what one connection holds: slots lent to it, and pins. Leases end with the connection.
"""

from typing import Final

import msgspec

from raykv.protocol.placement import Member, View
from raykv.types import NodeId

MAX_KEYS: Final = 1 << 20
"""Most keys in one request."""
MAX_HOLDERS: Final = 3
"""Most holders of one key in an answer."""


class Message(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of all messages.

    Attributes:
        group: Digest of the quota group that a request is for; the node counts requests and bytes by it. Empty: none.
    """

    group: bytes = b""


# -- requests ---------------------------------------------------------------------------------------------------------


class Attach(Message):
    """Ask for the node's name and the files of its memory. Answer: Attached."""


class GetView(Message):
    """Ask for the node's view of the cluster. Answer: ViewIs."""


class GetStats(Message):
    """Ask for the node's counters. Answer: Stats."""


class OpenNamespace(Message):
    """Give the quota group of a namespace (JSON) a number on this node. Answer: Done.

    `capacity_nbytes`: the most that its slots may take here; 0 for no bound, None to leave it.
    """

    namespace: bytes
    capacity_nbytes: int | None = None


class Lend(Message):
    """Lend slots for chunks of `nbytes` to this connection. Answer: Lent, with fewer than `count` when memory is full.

    `ahead`: further slots that the writer would like; nothing is evicted for them. `keys`, `parent`: chunks that must
    not be evicted to make room, since the writer is about to extend them.
    """

    nbytes: int
    count: int
    ahead: int = 0
    keys: bytes = b""
    parent: bytes = b""


class Run(msgspec.Struct, array_like=True):
    """Chunks of one size to be committed together: see `raykv.types.Batch`.

    `rows` i32 and `checksums` u64 of the lent slots; `positions` i32: which of `keys` each slot holds, empty when the
    slots hold all keys in order. `ahead`: slots of this size that the writer would like next. `ttl_s`, `priority`: 0
    for the namespace's own.
    """

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
    """Make chunks visible whose bytes are in lent slots. Answer: Committed. A wrong run does not stop the others."""

    runs: tuple[Run, ...]


class GiveBack(Message):
    """Return lent slots that were not committed: rows i32. Answer: Done."""

    rows: bytes


class Write(Message):
    """Store chunks of equal size from another host. Answer: Accepted; then the payload; then Count of those stored.

    Payload: the chunks that were accepted, and behind them the checksum of each, u64.
    """

    keys: bytes
    nbytes: int
    chained: bool = True
    parent: bytes = b""
    depth: int = 0
    ttl_s: float = 0.0
    priority: int = 0


class Read(Message):
    """Ask for the bytes of chunks. Answer: Reading, and the payload.

    `locate`: the node also says, as the keys' owner, which nodes hold the chunks that it lacks.
    """

    keys: bytes
    locate: bool = False


class Pin(Message):
    """Hold chunks in memory until Unpin. Answer: Held."""

    keys: bytes


class Unpin(Message):
    """End pins of this connection: rows i32. Answer: Done."""

    rows: bytes


class Promote(Message):
    """Bring chunks into memory from the tiers below it. Answer: Count of those that arrived or are on their way.

    `timeout_s`: how long the answer may wait for them. What takes longer still comes.
    """

    keys: bytes
    timeout_s: float = 0.0


class Delete(Message):
    """Drop chunks from memory and from the tiers. Answer: Count."""

    keys: bytes


class Suspect(Message):
    """A reader could not get these chunks here, or got wrong bytes: check them, and announce the result.

    Answer: Count of the chunks that were dropped.
    """

    keys: bytes


class Hint(Message):
    """What a client knows of chunks: see `Store.hint`. Answer: Count of those that are here."""

    keys: bytes
    ttl_s: float | None = None
    priority: int | None = None
    ended: bool = False
    touch: bool = False
    output_tokens: int | None = None


class Locate(Message):
    """Ask the owner of keys which nodes hold them. Answer: Located."""

    keys: bytes


class Announce(Message):
    """A holder reports to the owner of keys: it holds those in `added`, and no longer those in `removed`. Answer: Done.

    `nbytes` u32: length of each added chunk. `below_memory`: a bit for each added key, set when the chunk is in a tier
    below memory only; empty when no bit is set.
    """

    node_id: NodeId
    added: bytes = b""
    removed: bytes = b""
    nbytes: bytes = b""
    below_memory: bytes = b""


class Why(Message):
    """Ask where chunks are on this node, and why they left it. Answer: Histories."""

    keys: bytes


class Configure(Message):
    """Change fields (JSON) of a namespace's config, or drop the namespace (its fields as JSON). Answer: Configured.

    The node asks the directory. `registry`: the node's own list of namespaces, from a node to the membership proxy; see
    `MembershipPort.configure`.
    """

    namespace: bytes
    fields: bytes = b"{}"
    drop: bool = False
    registry: bytes | None = None


class Adopt(Message):
    """Follow this list of namespaces, which Configured gave. Answer: Count of the chunks dropped from `group`."""

    registry: bytes


class Report(Message):
    """What a client saw of `group` since its last report: see `ClientMetrics`. Answer: Done."""

    misses: dict[str, int]
    gets: tuple[int, ...] = ()
    puts: tuple[int, ...] = ()


class GetNamespaces(Message):
    """Ask for the quota groups of this node. Answer: NamespacesAre."""


class RecordTrace(Message):
    """Requests of a client, as `trace_requests.pack` writes them, for a trace that is being recorded. Answer: Done."""

    requests: bytes


class FetchTrace(Message):
    """Fetch the requests recorded so far; `on`: go on recording. From this host and user only. Answer: Trace."""

    on: bool


class Heartbeat(Message):
    """See `MembershipPort.beat`. Answer: HeartbeatAnswered."""

    member: Member
    view_epoch: int
    view: View | None = None
    version: int = 0
    registry: bytes | None = None


class Leave(Message):
    """See `MembershipPort.leave`. Answer: Done, or HeartbeatAnswered with a problem."""

    node_id: NodeId


# -- answers ----------------------------------------------------------------------------------------------------------


class Done(Message):
    """The request was carried out."""


class Count(Message):
    """A number; its meaning is the request's."""

    count: int


class Attached(Message):
    """Name and memory of a node. `secret` goes only to processes of the same user on the same host.

    `tiers`: whether the node has tiers below memory, so that a chunk that is not in memory may be promoted.
    """

    node_id: NodeId
    host: str
    incarnation: int
    table: str
    arena: str
    secret: bytes = b""
    tiers: bool = False

    def __repr__(self) -> str:
        """All fields except the value of the secret: this text may end in a log."""
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__ if name not in ("group", "secret"))
        fields = ", ".join(f"{name}={value!r}" for name, value in shown)
        return f"Attached({fields}, secret={'set' if self.secret else 'empty'})"


class ViewIs(Message):
    """The node's view of the cluster."""

    view: View


class Lent(Message):
    """Lent slots, rows i32 and offsets u64: the needed ones first, then those ahead."""

    rows: bytes = b""
    offsets: bytes = b""


class CommittedRun(msgspec.Struct, array_like=True):
    """What became of one Run.

    `unused` i32: places, among the run's rows, of slots whose keys another writer had stored; they stay lent. `rows`
    i32 and `offsets` u64: slots lent ahead. `problem`: why the run was refused; all its slots stay lent.
    """

    unused: bytes = b""
    rows: bytes = b""
    offsets: bytes = b""
    problem: str = ""


class Committed(Message):
    """One entry for each run of a Commit."""

    runs: tuple[CommittedRun, ...]


class Accepted(Message):
    """Positions, i32, of the keys whose chunks the node wants; `full`: number of other new keys without room."""

    positions: bytes
    full: int = 0


class Held(Message):
    """Pinned chunks, one entry a key: rows i32 (-1: not here), offsets u64, nbytes u32, checksums u64."""

    rows: bytes
    offsets: bytes
    nbytes: bytes
    checksums: bytes


class Reading(Message):
    """One entry a key: nbytes u32 (0: not here), checksums u64. Payload: the chunks that are here, in order.

    `choices`, `places`: as in Located, for the keys that are not here, when Read asked for them.
    """

    nbytes: bytes
    checksums: bytes
    choices: tuple[tuple[NodeId, ...], ...] = ()
    places: bytes = b""


class Located(Message):
    """Holders of each key: `places` i32 is its entry in `choices` (at most MAX_HOLDERS nodes each), -1 for none known.

    `nbytes` u32: length of each chunk, 0 for unknown; empty when none is known. `below_memory`: a bit for each key, set
    when all its holders have it in a tier below memory only; empty when no bit is set.
    """

    choices: tuple[tuple[NodeId, ...], ...]
    places: bytes
    nbytes: bytes = b""
    below_memory: bytes = b""


class Histories(Message):
    """One entry a key.

    `places` u8 (`reasons.Place`), `nbytes` u32: where the chunk is on this node. `reasons` u8 (`reasons.Reason`),
    `tiers` u8, `ages_s` f32, `policy` u8 (entry in `policies`): its last departure from this node. `announced` u8:
    whether this node, as its owner, knows a holder. `remembers_s`: how far back departures are remembered; None when
    all are.
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


class Configured(Message):
    """The list of namespaces after a change, and how many chunks the answering node dropped.

    `problem`: why the directory could not be asked; nothing was changed then.
    """

    registry: bytes = b""
    count: int = 0
    problem: str = ""


class NamespacesAre(Message):
    """The quota groups of a node, by their fields as JSON: JSON text."""

    namespaces: bytes


class Trace(Message):
    """Recorded requests; how many did not fit the node's buffer; whether there are more to fetch."""

    requests: bytes
    left_out: int = 0
    more: bool = False


class HeartbeatAnswered(Message):
    """A `HeartbeatAnswer`. `problem`: why the directory could not be asked."""

    view: View | None = None
    want_view: bool = False
    registry: bytes | None = None
    want_registry: bool = False
    problem: str = ""


class Stats(Message):
    """JSON text."""

    stats: bytes


class Failure(Message):
    """The request failed; `kind` is the name of the error class."""

    kind: str
    text: str


Request = (
    Attach | GetView | GetStats | OpenNamespace | Lend | Commit | GiveBack | Write | Read | Pin | Unpin | Promote
    | Delete | Suspect | Hint | Locate | Announce | Why | Configure | Adopt | Report | GetNamespaces | RecordTrace
    | FetchTrace | Heartbeat | Leave
)  # fmt: skip
Answer = (
    Done | Count | Attached | ViewIs | Lent | Committed | Accepted | Held | Reading | Located | Histories | Configured
    | NamespacesAre | Trace | HeartbeatAnswered | Stats | Failure
)  # fmt: skip
