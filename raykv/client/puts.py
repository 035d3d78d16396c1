"""Turns puts into batches, and stores batches on remote nodes: if this host has no node, or a namespace is spread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypedDict

from raykv.client.arguments import Keys, buffers, depth_of, flag, hints_of, parent_key
from raykv.client.router import Router
from raykv.client.writer import Pieces, Values
from raykv.errors import CapacityError, LostError, TransientError, UsageError
from raykv.protocol.namespace import Namespace
from raykv.transport.bulk_write import BulkWrite
from raykv.types import Batch, DirectValues, KeyArray, NodeId, PutResult, Scattered


class PutOptions(TypedDict, total=False):
    """Options of `Client.put`; see `Put`."""

    parent: KeyArray | None
    depth: int
    chained: bool
    ttl_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class Put:
    """Chunks to store with one call of `Client.put_many`.

    Attributes:
        keys: An array from `keys` or `chain`, or a list of names.
        values: For each key a contiguous buffer, or several buffers that are joined in order. Or `DirectValues`.
        parent: Key, shape [1, 2], of the chunk before keys[0]. None: keys[0] starts a prompt.
        depth: Number of chunks before keys[0] in its chain.
        chained: Whether each chunk follows the one before it in a prompt. False: the chunks are independent objects.
        ttl_s: Seconds until the chunks expire. None: the namespace's config decides.
        priority: -100 to 100. Higher priorities are evicted later. 0: the namespace's config decides.
    """

    keys: Keys
    values: Sequence[Scattered] | DirectValues
    parent: KeyArray | None = None
    depth: int = 0
    chained: bool = True
    ttl_s: float | None = None
    priority: int = 0


def batches_of(put: Put, keys: KeyArray) -> Iterator[tuple[Batch, Values]]:
    """Split a put into batches of consecutive chunks of equal size. Yield each batch with its bytes.

    Raises:
        UsageError: A field is wrong. The message names the field.
    """
    hints, depth, parent = hints_of(put.ttl_s, put.priority), depth_of(put.depth), parent_key(put.parent)
    chained = flag("chained", put.chained)
    if isinstance(put.values, DirectValues):
        if put.values.count != len(keys):
            raise UsageError(f"field 'values': {put.values.count} chunks for {len(keys)} keys")
        if len(keys):
            place = (parent, depth) if chained else (None, 0)
            yield Batch(keys, put.values.nbytes, *place, chained, hints), put.values
        return
    pieces, sizes = buffers("values", put.values, len(keys), writable=False)
    start = 0
    for size, run in groupby(sizes):
        stop = start + len(list(run))
        before = keys[start - 1 : start] if start else parent
        place = (before, depth + start) if chained else (None, 0)
        yield Batch(keys[start:stop], size, *place, chained, hints), pieces[start:stop]
        start = stop


def stores_remotely(router: Router, group: Namespace) -> bool:
    """Whether chunks of a quota group are sent to their owners, and not stored in this host's memory."""
    return router.local is None or router.writer is None or router.local.is_spread(group)


def put_spread(
    router: Router, group: Namespace, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
) -> PutResult:
    """Store each batch on the owner of its first key. Batches of this host's node are stored in its memory.

    Writes to other nodes are awaited. Arguments, result and errors as for `Writer.put`.
    """
    writer, result, near = router.writer, PutResult(), list[tuple[Batch, Values]]()
    for batch, given in batches:
        values = _written(given) if isinstance(given, DirectValues) else given
        if writer is not None and _owner(router, batch, deadline_s) in (router.local_id, None):
            near.append((batch, values))
        else:
            result += put_remote(router, group, batch, values, deadline_s)
    if writer is not None and near:
        result += writer.put(group, near, wait=wait, deadline_s=deadline_s)
    return result


def put_remote(router: Router, group: Namespace, batch: Batch, values: Pieces, deadline_s: float) -> PutResult:
    """Store a batch on the owner of its first key, so that all chunks of the batch are on one node.

    Raises:
        UsageError: The node refuses the size or another field.
    """
    write = BulkWrite(group, batch, values)
    try:
        name = _owner(router, batch, deadline_s)
        if name is None:
            return PutResult(skipped=len(batch.keys), reason="the cluster has no nodes")
        owner = router.member(name, deadline_s)
        path = router.paths.choose(owner, deadline_s=deadline_s, writes=True)
        stored = path.write(owner, write, deadline_s=deadline_s)
    except (TransientError, CapacityError, LostError) as error:
        return PutResult(skipped=len(batch.keys), reason=str(error))
    wanted = len(write.positions)
    existed = len(values) - wanted - write.full
    ours = min(existed, len(write.offered.difference(write.positions)))  # stored by an attempt whose answer was lost
    skipped = wanted - stored + write.full
    return PutResult(stored + ours, existed - ours, skipped, "full" if write.full else "")


def _written(values: DirectValues) -> list[list[memoryview]]:
    """Write values into memory of this process, because they must be sent."""
    views = [memoryview(bytearray(values.nbytes)) for _ in range(values.count)]
    values.write(range(values.count), views)
    return [[view] for view in views]


def _owner(router: Router, batch: Batch, deadline_s: float) -> NodeId | None:
    """Return the owner of a batch's first key; None if the cluster has no nodes."""
    ring = router.view(deadline_s).ring
    return ring.nodes[ring.owners(batch.keys[:1])[0]] if ring.nodes else None
