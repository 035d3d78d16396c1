"""The answers of the protocol, and the base of all messages. `raykv.protocol.messages` describes the format."""

from typing import Annotated, Final

import msgspec

from raykv.protocol.heat import HeatOrders
from raykv.protocol.keyring import Keyring
from raykv.protocol.placement import View
from raykv.protocol.rdma import QueuePairEnd
from raykv.protocol.request_trail import Entries
from raykv.protocol.trace_requests import TracedRequest
from raykv.types import NodeId

MAX_HOLDERS: Final = 3
"""An answer names at most this many holders of one key. Other holders are left out."""


class Message(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of all messages.

    Attributes:
        group: In a request, the digest of a quota group, or empty. A quota group is a namespace without salt and
            adapter. The node counts requests and bytes for each group.
    """

    group: bytes = b""


class Done(Message):
    """The request was carried out."""


class Count(Message):
    """A number. The docstring of the request says what it counts."""

    count: int


class Attached(Message):
    """Name of a node, and paths of its shared-memory files (`table` and `arena`).

    `secret`: the cluster's secret if the client is a process of the node's user on this host; otherwise empty. `tiers`:
    whether the node has tiers below memory (SSD or file), from which chunks can be promoted. `tls`: the fields of the
    node's TlsConfig, for the same clients as `secret`; empty without TLS. `cluster`: identity of the cluster, see
    `Keyring`.
    """

    node_id: NodeId
    host: str
    table: str
    arena: str
    secret: bytes = b""
    tiers: bool = False
    tls: dict[str, str] = {}
    cluster: bytes = b""

    def __repr__(self) -> str:
        """Show all fields, but hide the value of the secret: this text may be logged."""
        shown = msgspec.structs.replace(self, secret=b"set" if self.secret else b"")
        return msgspec.Struct.__repr__(shown)


class ViewIs(Message):
    """The node's view: its list of the cluster's members."""

    view: View


class Lent(Message):
    """Lent slots: `rows` i32, `offsets` u64 (in bytes, in the arena). The slots for `Lend.ahead` come last."""

    rows: bytes = b""
    offsets: bytes = b""


class CommittedRun(msgspec.Struct, array_like=True):
    """The outcome of one Run.

    `unused` i32: the slots that stay lent because their keys were stored already, as indices in the run's `rows`.
    `rows` i32, `offsets` u64: slots lent for later writes. `problem`: why the node refused the run; empty if it did
    not. All slots of a refused run stay lent.
    """

    unused: bytes = b""
    rows: bytes = b""
    offsets: bytes = b""
    problem: str = ""


class Committed(Message):
    """The outcomes of a Commit, one entry for each run."""

    runs: tuple[CommittedRun, ...]


class Accepted(Message):
    """The client must send the chunks of the keys at `positions` (i32). `full`: number of new chunks that don't fit.

    For a Write with `rdma`: `offsets` u64 (of the slots, in the arena), and `remote_keys` as in Found.
    """

    positions: bytes
    full: int = 0
    offsets: bytes = b""
    remote_keys: bytes = b""


class Held(Message):
    """Pinned chunks, one entry for each key: rows i32 (-1: no such chunk), offsets u64, nbytes u32, checksums u64."""

    rows: bytes
    offsets: bytes
    nbytes: bytes
    checksums: bytes


class Reading(Message):
    """For each key: nbytes u32 (0: not found), checksums u64. Payload: the found chunks, in the order of the keys.

    `choices`, `places`: holders of the chunks that were not found, as in Located. Both are empty without `Read.locate`.
    """

    nbytes: bytes
    checksums: bytes
    choices: tuple[tuple[NodeId, ...], ...] = ()
    places: bytes = b""


class Found(Message):
    """Where the holder has chunks, for reads over RDMA. Nothing is pinned. One entry for each key, as in Held.

    `generations` u32: generation of each row. `remote_keys` u32, shape [ends of the connection, keys]: the registration
    that covers the chunk; 0 if it is not registered. `choices`, `places`: as in Reading.
    """

    rows: bytes
    offsets: bytes
    nbytes: bytes
    checksums: bytes
    generations: bytes
    remote_keys: bytes
    choices: tuple[tuple[NodeId, ...], ...] = ()
    places: bytes = b""


class RdmaConnected(Message):
    """The node's ends of the queue pairs, in the order of the request.

    `arena`, `records`: addresses of the arena and of the table's records (`layout.RECORD`) in the node's process.
    `record_keys` u32: for each queue pair, the key of the registration of the records.
    """

    ends: tuple[QueuePairEnd, ...]
    arena: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    records: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    record_keys: bytes


class NixlConnected(Message):
    """How the node's agent is reached. `metadata`: the agent's own format; `parts`: as many parts are known now.

    `arena`, `records`: as in RdmaConnected. In Found, the key of a chunk is the number of its part, from 1.
    """

    metadata: bytes
    parts: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    arena: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    records: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Located(Message):
    """The holders of chunks.

    `choices`: the distinct lists of holders, at most MAX_HOLDERS nodes each. `places` i32: for each key, the index of
    its list in `choices`; -1 if no holder is known. `nbytes` u32: length of each chunk, 0 if unknown; empty when no
    length is known. `below_memory`: one bit for each key, set if all holders have the chunk only in a tier below
    memory; empty when no bit is set.
    """

    choices: tuple[tuple[NodeId, ...], ...]
    places: bytes
    nbytes: bytes = b""
    below_memory: bytes = b""


class Histories(Message):
    """Where this node has chunks, and how each chunk last left the node's memory or a tier. One entry for each key.

    Now: `places` u8 (the fastest tier with the chunk, a `reasons.Place`), `nbytes` u32. Last departure: `reasons` u8 (a
    `reasons.Reason`), `tiers` u8 (the tier that was left), `ages_s` f32 (seconds since the departure), `policy` u8 (the
    policy, as an index in `policies`). `announced` u8: 1 if this node, as the owner of the key, knows a holder.
    `remembers_s`: age of the oldest departure in the log; None when the log has all departures since the start.
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
    """The list of namespaces after a change."""

    registry: bytes


class Trace(Message):
    """The requests that were recorded since the last FetchTrace."""

    requests: list[TracedRequest]


class Trail(Message):
    """The sentences about a request, oldest first."""

    entries: Entries


class HeartbeatAnswer(Message):
    """The directory's view, list of namespaces and secrets. Each is None if the node's copy is up to date.

    `want_view`: the directory wants the node's view, which is newer. `want_registry`: the directory wants the node's
    list of namespaces, which may have more entries. `want_keyring`: the directory wants the node's secrets, which are
    newer. The node at once sends the wanted parts in another heartbeat. `heat`: what the node must do with replicas;
    None if the heartbeat had no report, or if reports of other nodes are missing.
    """

    view: View | None = None
    want_view: bool = False
    registry: bytes | None = None
    want_registry: bool = False
    keyring: Keyring | None = None
    want_keyring: bool = False
    heat: HeatOrders | None = None


class Unavailable(Message):
    """The directory did not answer, so nothing was changed. `problem`: the error text."""

    problem: str


class Stats(Message):
    """The node's counters as JSON text: see `Node.stats`."""

    stats: bytes


class Failure(Message):
    """The request failed. `kind`: name of the error class. `text`: the error text."""

    kind: str
    text: str
