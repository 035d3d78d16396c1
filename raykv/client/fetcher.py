"""Reads chunks from this host's memory, from known holders, and through the owners of the keys.

A data path (`raykv.transport.data_path`) moves the bytes. If a read from another node fails, the chunks of that read
are misses.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.client.read_failures import Kind
from raykv.client.router import Holders, Router
from raykv.errors import RayKVError
from raykv.protocol import chunk_keys, messages
from raykv.transport.bulk_read import ReadProgress, ReadRun
from raykv.types import Bits, KeyArray, NodeId, Scattered

STREAM_NBYTES: Final = 8 << 20
"""A read of n bytes from one node uses n // STREAM_NBYTES connections, at least 1, at most `streams_per_peer`."""
MAX_STREAMS: Final = 4
"""Largest number of connections if `streams_per_peer` is None."""


class Fetcher:
    """Reads chunks of one quota group. Thread-safe."""

    def __init__(self, router: Router, group: bytes) -> None:
        self._router, self._group = router, group
        self._streams = router.config.streams_per_peer or default_streams()

    # -- this host --------------------------------------------------------------------------------------------------

    def lengths(self, keys: KeyArray, deadline_s: float) -> npt.NDArray[np.uint32]:
        """Return the length in bytes of each chunk in this host's memory, 0 for a chunk that is not there."""
        local, writer = self._router.local, self._router.writer
        if local is None or writer is None:
            return np.zeros(len(keys), np.uint32)
        lengths = local.reader.lengths(keys, now_s=time.monotonic())
        if not lengths.all() and writer.drain(deadline_s):
            lengths = local.reader.lengths(keys, now_s=time.monotonic())
        return lengths

    def ready(self, keys: KeyArray, deadline_s: float) -> Bits:
        """Return whether each chunk is in this host's memory. Costs less than `lengths`."""
        local, writer = self._router.local, self._router.writer
        if local is None or writer is None:
            return np.zeros(len(keys), np.bool_)
        ready = local.reader.ready(keys, now_s=time.monotonic())
        if not ready.all() and writer.drain(deadline_s):
            ready = local.reader.ready(keys, now_s=time.monotonic())
        return ready

    def read_here(self, keys: KeyArray, into: Sequence[Scattered], deadline_s: float) -> tuple[Bits, int]:
        """Copy chunks out of this host's memory. Returns a hit flag per key, and the total bytes copied."""
        local, writer = self._router.local, self._router.writer
        if local is None or writer is None:
            return np.zeros(len(keys), np.bool_), 0
        verify, threads = self._router.config.verify == "always", self._router.copy_threads
        read = partial(local.reader.read, keys, into, verify=verify, threads=threads)
        hits, nbytes = read(now_s=time.monotonic())
        if not hits.all() and writer.drain(deadline_s):
            hits, nbytes = read(now_s=time.monotonic())
        return hits, nbytes

    # -- other nodes ------------------------------------------------------------------------------------------------

    def fetch(self, progress: ReadProgress, holders: Mapping[int, NodeId], deadline_s: float) -> None:
        """Read missing chunks in parallel. `holders` maps a chunk's index to its holder. Other chunks are not read."""
        shares = by_node((place, holders.get(place)) for place in progress.missing())
        self._read(self._runs(progress, shares), deadline_s)

    def find(self, progress: ReadProgress, deadline_s: float) -> None:
        """Request the missing chunks from their owners. Then read from the holders that the owners name.

        An owner often holds the chunks itself. So one request asks the owner for the chunks, and for the holders of the
        chunks that the owner lacks. The holders of a chunk are tried one after the other.
        """
        named: dict[int, Holders] = {}
        unknown = progress.missing()
        for view in self._router.views(deadline_s) if unknown else ():
            shares = self._router.shares(view, progress.keys[unknown])
            places = {owner: [unknown[at] for at in share] for owner, share in shares.items()}
            runs = self._runs(progress, places, locate=True)
            self._read(runs, deadline_s)
            named |= {place: holders for run in runs for place, holders in run.named.items()}
            unknown = [place for place in progress.missing() if not named.get(place)]
            if not unknown:
                break
        for choice in range(messages.MAX_HOLDERS):
            holders = {place: names[choice] for place, names in named.items() if choice < len(names)}
            self.fetch(progress, holders, deadline_s)

    def _runs(
        self, progress: ReadProgress, shares: Mapping[NodeId, list[int]], *, locate: bool = False
    ) -> list[ReadRun]:
        """Split each node's chunks into runs: one run, or several if the chunks are large.

        The runs of a node take its chunks in turn. So all runs begin with the leading chunks, and what has arrived by a
        deadline is nearly a prefix, which is all that an engine can use.

        Args:
            shares: For each node, the indices of the chunks to read from this node.
            locate: Whether the nodes are asked as owners: see `ReadRun`.
        """
        runs = []
        for node_id, places in shares.items():
            count = max(1, min(self._streams, progress.nbytes(places) // STREAM_NBYTES, len(places)))
            runs += [ReadRun(progress, node_id, places[first::count], locate=locate) for first in range(count)]
        return runs

    def _read(self, runs: Sequence[ReadRun], deadline_s: float) -> None:
        """Read all runs in parallel. Record the chunks that arrived, even if their run failed later."""
        router = self._router
        outcomes = router.parallel.run(
            {number: partial(self._read_run, run, deadline_s) for number, run in enumerate(runs)}
        )
        for number, run in enumerate(runs):
            progress = run.progress
            progress.record_run(run)
            if run.corrupt:
                self._add_failure(map(progress.raw_key, run.corrupt), "corrupt", run.holder)
            if isinstance(outcomes[number], RayKVError):
                self._add_failure(map(progress.raw_key, run.missing), "no_answer", run.holder)
            if run.gone:  # ask the holder to tell the owners which of these chunks it still has
                request = messages.Suspect(progress.raw_keys(sorted(run.gone)), group=self._group)
                router.parallel.in_background(partial(router.call, run.holder, request, deadline_s))

    def _read_run(self, run: ReadRun, deadline_s: float) -> None:
        """Read the chunks of a run from one node. If `run.locate`, also ask this node who holds the missing chunks."""
        router, nbytes, began_s = self._router, run.progress.nbytes(run.places), time.monotonic()
        member = router.member(run.holder, deadline_s)
        router.loads.begin(run.holder, nbytes)
        try:
            router.paths.choose(member, deadline_s=deadline_s).read(member, run, deadline_s=deadline_s)
        finally:
            router.loads.end(run.holder, nbytes, time.monotonic() - began_s)
        if not run.locate:
            return
        run.named = {place: self._router.nearest_first(names) for place, names in run.named.items()}
        unknown = [place for place in run.missing if place not in run.named]
        if unknown:
            found = self._router.ask_owner(run.holder, run.progress.keys[unknown], self._group, deadline_s)
            useless = {*run.corrupt, *run.other_size}
            for place, names in zip(unknown, found.holders, strict=True):
                run.named[place] = tuple(n for n in names if n != run.holder) if place in useless else names

    def _add_failure(self, keys: Iterable[bytes], kind: Kind, node: NodeId) -> None:
        self._router.read_failures.add(keys, kind, node, now_s=time.monotonic())

    def promote(self, keys: KeyArray, holders: Sequence[NodeId | None], deadline_s: float) -> None:
        """Ask the holders to load chunks into memory. Does not wait until the chunks are loaded."""
        requests = {
            holder: messages.Promote(chunk_keys.to_bytes(keys[places]), group=self._group)
            for holder, places in by_node(enumerate(holders)).items()
        }
        self._router.call_each(requests, deadline_s)

    def record_end(self, progress: ReadProgress, *, late: bool) -> None:
        """End a `get`: drop the failures of chunks that arrived. If `late`, record missing chunks as timed out."""
        failures = self._router.read_failures
        if late:
            failures.add(map(progress.raw_key, progress.missing()), "timed_out", None, now_s=time.monotonic())
        failures.remove(progress.raw_key(place) for place, hit in enumerate(progress.hits) if hit)


def by_node(pairs: Iterable[tuple[int, NodeId | None]]) -> dict[NodeId, list[int]]:
    """Group positions by node. Positions without a node are left out."""
    found: dict[NodeId, list[int]] = {}
    for place, node in pairs:
        if node is not None:
            found.setdefault(node, []).append(place)
    return found


def default_streams() -> int:
    """Return the default of `streams_per_peer`: a quarter of the number of cores, from 1 to MAX_STREAMS.

    Each connection can occupy a core, so one read should use only a part of the cores.
    """
    return max(1, min(MAX_STREAMS, len(os.sched_getaffinity(0)) // 4))
