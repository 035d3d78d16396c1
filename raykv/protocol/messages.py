"""The messages of the protocol: the requests, and all answers. `raykv.protocol.codec` encodes them as bytes.

Arrays are raw little-endian bytes. The docstrings give their element types (i32, u64, ...). Keys are 16 bytes each, as
`chunk_keys.to_bytes` encodes them. A payload of chunk bytes follows some answers.

A slot is the place of one chunk in the node's memory (the arena). Messages name a slot by its row number. A lease is a
slot lent to a writer, or a pin that keeps a chunk's bytes in place for a reader. A lease ends with its connection.
"""

import math
from typing import Annotated, Final, TypeAlias

import msgspec

from raykv.protocol.answers import MAX_HOLDERS as MAX_HOLDERS
from raykv.protocol.answers import Accepted as Accepted
from raykv.protocol.answers import Attached as Attached
from raykv.protocol.answers import Committed as Committed
from raykv.protocol.answers import CommittedRun as CommittedRun
from raykv.protocol.answers import Configured as Configured
from raykv.protocol.answers import Count as Count
from raykv.protocol.answers import Done as Done
from raykv.protocol.answers import Failure as Failure
from raykv.protocol.answers import Found as Found
from raykv.protocol.answers import HeartbeatAnswer as HeartbeatAnswer
from raykv.protocol.answers import Held as Held
from raykv.protocol.answers import Histories as Histories
from raykv.protocol.answers import Lent as Lent
from raykv.protocol.answers import Located as Located
from raykv.protocol.answers import Message as Message
from raykv.protocol.answers import NixlConnected as NixlConnected
from raykv.protocol.answers import RdmaConnected as RdmaConnected
from raykv.protocol.answers import Reading as Reading
from raykv.protocol.answers import Stats as Stats
from raykv.protocol.answers import Trace as Trace
from raykv.protocol.answers import Trail as Trail
from raykv.protocol.answers import Unavailable as Unavailable
from raykv.protocol.answers import ViewIs as ViewIs
from raykv.protocol.heat import HeatReport
from raykv.protocol.keyring import Keyring
from raykv.protocol.placement import Member, MemberId, View
from raykv.protocol.rdma import MAX_RAILS, QueuePairEnd
from raykv.protocol.request_trail import AskedId, Entries
from raykv.protocol.trace_requests import TracedRequest
from raykv.types import NodeId

MAX_KEYS: Final = 1 << 20
"""A request may contain at most this many keys. The receiver refuses a longer request."""

ReportedCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class Attach(Message):
    """Ask for the node's name and the paths of its shared-memory files. Answer: Attached."""


class GetView(Message):
    """Ask for the node's view (its list of the cluster's members). Answer: ViewIs."""


class GetStats(Message):
    """Ask for the node's counters. Answer: Stats."""


class OpenNamespace(Message):
    """Register the quota group of `namespace` (JSON) on this node, so that the group can have chunks. Answer: Done."""

    namespace: bytes


class Lend(Message):
    """Lend `count` slots of `nbytes` bytes to this connection. Answer: Lent, with fewer slots when memory is full.

    `ahead`: number of additional slots for later writes. The node evicts nothing to get these slots. `keys`, `parent`:
    the chunks to be written, and the chunk before them. The node evicts none of these chunks. `until_s`: time of the
    host's monotonic clock at which the writer gives up. After this time the node lends only the additional slots.
    """

    nbytes: int
    count: int
    ahead: int = 0
    keys: bytes = b""
    parent: bytes = b""
    until_s: float = math.inf


class Run(msgspec.Struct, array_like=True):
    """Chunks of one size to be committed together. See `raykv.types.Batch` for the fields that are not listed here.

    `rows` i32, `checksums` u64: one entry for each filled slot. `positions` i32: for each slot, the index of the
    chunk's key in `keys`. If `positions` is empty, there is one slot for each key, in order. `ahead`: number of slots
    of this size to lend for later writes. `ttl_s`, `priority`: 0 means the namespace's default.
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
    """Make chunks in lent slots visible to readers. Answer: Committed. A failed run does not stop the other runs."""

    runs: tuple[Run, ...]


class GiveBack(Message):
    """Return lent slots that were not committed. `rows` is i32. Answer: Done."""

    rows: bytes


class Write(Message):
    """Store chunks of equal size that a client on another host sends. See `raykv.types.Batch` for the fields.

    Answer: Accepted. Then the client sends the bytes of the accepted chunks, and the message Checksums. Second answer:
    Count of the chunks that the node stored. `evict`: whether the node may evict other chunks to make room. `below`:
    store the chunks in a tier of the node, not in memory, and only if they replace nothing there. `replica`: if not
    empty, the chunks are replicas, and this is the key of the first chunk of their hot prefix. `rdma`: the client
    writes to the slots over this connection's queue pairs. Then it sends Placed, and the bytes of the other chunks.
    """

    keys: bytes
    nbytes: int
    chained: bool = True
    parent: bytes = b""
    depth: int = 0
    ttl_s: float = 0.0
    priority: int = 0
    evict: bool = True
    below: bool = False
    replica: bytes = b""
    rdma: bool = False


class Placed(Message):
    """Follows Accepted in a Write with `rdma`. The client has no request to a slot under way any more.

    `places`: one bit for each accepted chunk, set if its bytes are in its slot; empty when no bit is set. The bytes of
    the other chunks follow. `broken`: a queue pair has failed, so old packets of it may still arrive. The node destroys
    its ends of all queue pairs of this connection, before it commits a chunk or takes a slot back.
    """

    places: bytes = b""
    broken: bool = False


class Checksums(Message):
    """Follows the bytes of a Write: the checksum (u64) of each chunk."""

    checksums: bytes


class Read(Message):
    """Ask for the bytes of chunks. Answer: Reading, and the payload.

    `locate`: whether the node, as the owner of the keys, must name the holders of the chunks that it lacks.
    """

    keys: bytes
    locate: bool = False


class Find(Message):
    """Ask where the node has chunks, to read them over RDMA or NIXL. Answer: Found. `locate`: as in Read."""

    keys: bytes
    locate: bool = False
    nixl: bool = False


class ConnectNixl(Message):
    """Ask how the node's agent is reached. `parts`: how many parts the sender knows already. Answer: NixlConnected."""

    parts: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0


class ConnectRdma(Message):
    """Connect queue pairs of the sender with new ones of the node. Answer: RdmaConnected.

    `ends`: the sender's ends. The node's ends belong to this connection, and end with it.
    """

    ends: Annotated[tuple[QueuePairEnd, ...], msgspec.Meta(min_length=1, max_length=MAX_RAILS)]


class Pin(Message):
    """Hold chunks in memory until Unpin or the end of the connection. Answer: Held."""

    keys: bytes


class Unpin(Message):
    """Release pins of this connection. `rows` is i32. Answer: Done."""

    rows: bytes


class Promote(Message):
    """Promote chunks: copy them from the tiers below memory (SSD or file) to memory.

    The node reads chunks in batches. It answers after `timeout_s` seconds at the latest, and continues to promote after
    the answer. Answer: Count of the chunks in all batches that this request began or joined.
    """

    keys: bytes
    timeout_s: float = 0.0


class Delete(Message):
    """Delete chunks. Answer: Count of those deleted from memory, or from the tiers if that number is larger."""

    keys: bytes


class Suspect(Message):
    """Report chunks that a reader could not get from this node, or whose bytes were wrong.

    The node drops corrupt chunks, and tells owners which reported chunks it still has. Answer: Count of dropped chunks.
    """

    keys: bytes


class Hint(Message):
    """Change hints: see `Store.hint`, or `RowHints.retain` if `retain` is given. Answer: Count of chunks in memory."""

    keys: bytes
    ttl_s: float | None = None
    priority: int | None = None
    ended: bool = False
    touch: bool = False
    output_tokens: int | None = None
    retain: tuple[float, int] | None = None


class Locate(Message):
    """Ask the owner of keys which nodes hold them. Answer: Located."""

    keys: bytes


class Announce(Message):
    """Report to the owner of keys that node `node_id` holds all chunks in `added`, and none in `removed`. Answer: Done.

    `nbytes` u32: length of each added chunk. `below_memory`: one bit for each added key, set if the chunk is only in a
    tier below memory; empty when no bit is set. `incarnation` of the sender: if the receiver's view has an older
    one, the sender has restarted with an empty location index, and the receiver announces the sender's keys again.
    """

    node_id: MemberId
    added: bytes = b""
    removed: bytes = b""
    nbytes: bytes = b""
    below_memory: bytes = b""
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class Why(Message):
    """Ask whether this node has chunks, and why each chunk last left the node's memory or a tier. Answer: Histories."""

    keys: bytes


class Configure(Message):
    """Change a namespace's config, or drop the namespace. Answer: Configured, or Unavailable.

    `namespace` is JSON. `fields`: the config's fields to change, as JSON; None to drop the namespace. The node sets
    `registry` to its list of namespaces, and forwards the request to the directory. The directory first merges this
    list into its own list, because a restarted directory has lost its list.
    """

    namespace: bytes
    fields: bytes | None
    registry: bytes | None = None


class Adopt(Message):
    """Adopt a list of namespaces. Answer: Count of the copies of chunks that the last drop of `group` deleted here."""

    registry: bytes


class Report(Message):
    """Report a client's misses (by reason) and durations (histograms) since its last report. Answer: Done."""

    misses: dict[Annotated[str, msgspec.Meta(max_length=32)], ReportedCount]
    gets: tuple[ReportedCount, ...] = ()
    puts: tuple[ReportedCount, ...] = ()


class RecordTrace(Message):
    """Add a client's requests to the trace that the node records. Answer: Done."""

    requests: list[TracedRequest]


class FetchTrace(Message):
    """Fetch recorded requests. Other users and hosts are refused. `on`: whether to record afterwards. Answer: Trace."""

    on: bool


class AddToTrail(Message):
    """Keep sentences about requests. Answer: Done."""

    entries: Entries


class GetTrail(Message):
    """Ask for the sentences about the requests whose id contains `request_id`. Answer: Trail."""

    request_id: AskedId


class Drain(Message):
    """Move this node's chunks to other nodes, at most `nbytes_per_s` bytes a second. Answer: Done, at once.

    Only a process of this host and user may send it. `GetStats` shows the progress.
    """

    nbytes_per_s: float


class Heartbeat(Message):
    """A node tells the directory that it is alive. Answer: HeartbeatAnswer, or Unavailable.

    `member`: the node. `epoch`: version of the node's view (its list of members). `version`: version of the node's list
    of namespaces. `view`, `registry`: this view and this list (encoded), each only if the directory has asked for it.
    `keyring_version`: version of the secrets that the node uses. `keyring`: these secrets, if the directory has asked.
    `heat`: the load of the node's chunks.
    """

    member: Member
    epoch: int
    view: View | None = None
    version: int = 0
    registry: bytes | None = None
    keyring_version: int = 0
    keyring: Keyring | None = None
    heat: HeatReport | None = None


class Leave(Message):
    """Tell the membership proxy that a node stops permanently and leaves the cluster. Answer: Done, or Unavailable."""

    node_id: NodeId


Request = (
    Attach | GetView | GetStats | OpenNamespace | Lend | Commit | GiveBack | Write | Placed | Checksums | Read | Find
    | Pin | Unpin | ConnectRdma | Promote | Delete | Suspect | Hint | Locate | Announce | Why | Configure | Adopt
    | Report | RecordTrace | FetchTrace | AddToTrail | GetTrail | Drain | Heartbeat | Leave
    | ConnectNixl
)  # fmt: skip
Answer = (
    Done | Count | Attached | ViewIs | Lent | Committed | Accepted | Held | Reading | Found | RdmaConnected | Located
    | Histories | Configured | Trace | Trail | HeartbeatAnswer | Unavailable | Stats | Failure
    | NixlConnected
)  # fmt: skip
