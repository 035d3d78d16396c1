"""KV events: routers learn which blocks this engine has stored in raykv, and which of them are gone.

This module is used only if vLLM publishes KV events.

The scheduler's side makes the event of each save that it orders. After the save, every rank reports which chunks it has
stored. When all ranks have reported, the event is published. It names only the chunks that all ranks have stored.

`removals` finds out which of the published chunks are gone.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.metadata import Save
from raykv.integrations.vllm.removals import Removals
from raykv.types import KeyArray

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from raykv import Client

MAX_PENDING_SAVES: Final = 1024
"""At most this many saves wait for reports. Beyond that, the oldest save gets no event."""
REPORT_WAIT_S: Final = 1.0
"""An idle engine makes steps until the reports of its last saves have arrived, but not longer than this."""


def publishes_events(config: "VllmConfig") -> bool:
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


Stored: TypeAlias = dict[int, list[frozenset[int]]]
"""The stored chunks of saves, as in `WorkerReport.stored`."""


class _Put(NamedTuple):
    """Consecutive chunks that were given to the client. `is_stored`: the node has confirmed all of them."""

    keys: KeyArray
    depth: int
    is_stored: bool


class Reporter:
    """Finds out which chunks of each save one worker has stored.

    The thread that saves calls `add` and `settle`. Both this thread and the engine's thread call `skip`. The engine's
    thread calls the other methods.
    """

    def __init__(self) -> None:
        self._puts: dict[int, list[_Put]] = {}
        self._reports: deque[tuple[int, frozenset[int]]] = deque()

    @property
    def is_waiting(self) -> bool:
        """Whether some chunks still wait for the node's answer."""
        return bool(self._puts)

    def watch(self, saves: Sequence[Save], future: Future[Any]) -> None:
        """If `future` is cancelled, report that no chunk of these saves is stored."""
        future.add_done_callback(lambda done: self.skip(saves) if done.cancelled() else None)

    def skip(self, saves: Sequence[Save]) -> None:
        """Report that no chunk of these saves is stored."""
        self._reports += [(save.number, frozenset()) for save in saves]

    def add(self, number: int, keys: KeyArray, depth: int, *, is_stored: bool) -> None:
        self._puts.setdefault(number, []).append(_Put(keys, depth, is_stored))

    def settle(self, client: "Client", saves: Sequence[Save], *, is_answered: bool) -> None:
        """Report saves in order. Stop before the first save for which the node has not answered.

        Args:
            saves: The saves that have just ended.
            is_answered: Whether the node has answered for all chunks so far. If so, a lookup in this host's memory
                shows which chunks the node has stored.
        """
        for save in saves:
            self._puts.setdefault(save.number, [])
        for number, puts in list(self._puts.items()):
            if not is_answered and not all(put.is_stored for put in puts):
                break
            stored = frozenset(depth for put in puts for depth in _stored(client, put))
            self._reports.append((number, stored))
            del self._puts[number]

    def pop(self) -> Stored:
        """Return the reports since the last call."""
        return {number: [stored] for number, stored in (self._reports.popleft() for _ in range(len(self._reports)))}


def _stored(client: "Client", put: _Put) -> Iterator[int]:
    exists = [True] * len(put.keys) if put.is_stored else client.exists(put.keys, timeout_s=0.0)
    return (put.depth + place for place, is_stored in enumerate(exists) if is_stored)


@dataclass(slots=True)
class _Pending:
    """A save whose reports have not all arrived. `event` covers all chunks of the save."""

    save: Save
    event: BlockStored
    stored: list[frozenset[int]] = field(default_factory=list)


class StoredEvents:
    """Makes the events, for the scheduler's side.

    Attributes:
        removals: Remembers the chunks that were named in events, and finds those that are gone.
    """

    def __init__(self, config: "KVCacheConfig", groups: Groups, removals: Removals, *, ranks: int) -> None:
        """Start without events. `ranks`: how many ranks report each save."""
        self._groups, self.removals, self._ranks = groups, removals, ranks
        self._specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._pending: dict[int, _Pending] = {}
        self._count, self._ordered_s = 0, 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether reports are missing, and the last save was ordered less than REPORT_WAIT_S ago."""
        return bool(self._pending) and time.monotonic() - self._ordered_s < REPORT_WAIT_S

    def add(self, request: "Request", save: Save, end: int) -> Save:
        """Make the event of a save whose last chunk ends at token `end`. Returns the save with a number."""
        self._count, self._ordered_s = self._count + 1, time.monotonic()
        numbered = replace(save, number=self._count)
        self._pending[self._count] = _Pending(numbered, self._event(request, save, end))
        if len(self._pending) > MAX_PENDING_SAVES:
            del self._pending[next(iter(self._pending))]
        return numbered

    def drop(self, saves: Sequence[Save]) -> None:
        """Forget saves that are not ordered after all."""
        for save in saves:
            self._pending.pop(save.number, None)

    def end_epoch(self) -> None:
        """Forget all saves. Report all published chunks as removed, because this engine will not reuse them."""
        self._pending.clear()
        self.removals.clear()

    def close(self) -> None:
        self.removals.close()

    def receive(self, reports: Stored) -> None:
        """Add reports of workers."""
        for number, stored in reports.items():
            if number in self._pending:
                self._pending[number].stored += stored

    def take(self, *, is_local: bool) -> Iterator[BlockStored | BlockRemoved]:
        """Yield the events of removed chunks, then the events of saves in order.

        Stops before the first save that not all ranks have reported. Removals come first, because a save may have
        stored a removed chunk again.

        Args:
            is_local: Whether the chunks are stored on this host.
        """
        yield from self.removals.take()
        while self._pending:
            number, first = next(iter(self._pending.items()))
            if len(first.stored) < self._ranks:
                return
            del self._pending[number]
            first.event.locality = "LOCAL" if is_local else "REMOTE"
            for names, event in _parts(first, frozenset.intersection(*first.stored)):
                self.removals.add(first.save.scope, names, event)
                yield event

    def _event(self, request: "Request", save: Save, end: int) -> BlockStored:
        """Make an event as vLLM's own cache does. An event of a partial block has only the last hash of this block."""
        group = next(each for each in self._groups.each if each.index == save.group)
        hashes, unit = request.block_hashes, self._groups.hash_tokens
        size, blocks = group.block_tokens, len(save.names) * group.chunk_blocks
        if end % size:
            size, blocks = unit, 1
        ends = range(end - (blocks - 1) * size, end + 1, size)
        start, keys, media = end - blocks * size, [], 0
        for stop in ends:
            extra, media = generate_block_hash_extra_keys(request, stop - size, stop, media)
            keys.append(extra)
        lora, spec = request.lora_request, self._specs[save.group]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[stop // unit - 1]) for stop in ends],
            parent_block_hash=maybe_convert_block_hash(hashes[start // unit - 1]) if start else None,
            token_ids=request.all_token_ids[start:end],
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(keys),
            group_idx=save.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            session_id=request.session_id,
        )


def _parts(pending: _Pending, stored: frozenset[int]) -> Iterator[tuple[list[bytes], BlockStored]]:
    """Yield (names, event) for each run of consecutive stored chunks of a save."""
    save, event = pending.save, pending.event
    chunks, size = range(save.depth, save.depth + len(save.names)), len(event.block_hashes) // len(save.names)
    if stored.issuperset(chunks):
        yield save.names, event
        return
    start = None
    for chunk in [*chunks, None]:
        if chunk in stored:
            start = chunk if start is None else start
        elif start is not None:
            first, last = start - save.depth, (chunks.stop if chunk is None else chunk) - save.depth
            yield save.names[first:last], _cut(event, first * size, last * size)
            start = None


def _cut(event: BlockStored, start: int, stop: int) -> BlockStored:
    """Return the part of an event that covers its blocks `start` to `stop` - 1."""
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[start:stop],
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        token_ids=event.token_ids[start * event.block_size : stop * event.block_size],
        extra_keys=event.extra_keys and event.extra_keys[start:stop],
    )
