"""Stores chunks in this host's node: requests slots, fills them, and commits them.

The writer has a separate connection, so a waiting reader never blocks a writer. The node lends slots before they are
needed (`raykv.client.slot_pool`). A put copies and hashes the bytes in one pass, and sends one Commit. The answer to
the Commit lends the next slots. If a put does not wait, a later call collects the answer.

After a call has reached its deadline, the connection and the leases remain: see `raykv.client.pipeline`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.client.local_connection import LocalConnection
from raykv.client.pipeline import NO_ANSWER, Outcome
from raykv.client.slot_pool import LentBatch, Slot
from raykv.client.slot_supply import SlotSupply, rows_of
from raykv.errors import CapacityError, LostError, ProtocolError, RayKVError, TransientError, UsageError
from raykv.memory.copying import CopyThreads, checksums_of
from raykv.memory.slots import slot_nbytes
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import array, expect
from raykv.protocol.namespace import Namespace
from raykv.transport.forking import drop_after_fork
from raykv.types import Batch, DirectValues, PutResult

Pieces = Sequence[Sequence[memoryview]]
"""Bytes of several chunks: for each chunk a list of views that are joined in order."""
Values = Pieces | DirectValues

LATE_S: Final = 0.001
"""A put may spend this long on sending the commit of filled slots, even if the put's deadline has passed."""
CLOSE_S: Final = 0.2
"""`close` takes at most this long to give slots back. After that, the node quarantines the remaining slots."""
PUT_SHARE: Final = 4
"""A put of more bytes than 1 / PUT_SHARE of the arena is done in parts, because the node lends a connection only a part
of the arena at once."""
_UNAVAILABLE: Final = (TransientError, CapacityError, LostError)


class Writer:
    """Stores chunks of one process in the node of its host. Thread-safe."""

    def __init__(self, local: LocalConnection, threads: CopyThreads, *, retry_s: float) -> None:
        """Connect at first use.

        Args:
            threads: Threads for large copies.
            retry_s: After a failed attempt to connect, the next attempt is made after this time at the earliest.
        """
        self._local, self._threads = local, threads
        self.supply = SlotSupply(local, retry_s=retry_s)
        self.pipeline = self.supply.pipeline
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Drop posted commits and their results, because these belong to the parent."""
        self._results, self._unanswered = PutResult(), set[PendingCommit]()

    def put(
        self, group: Namespace, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
    ) -> PutResult:
        """Store batches with one Commit.

        Args:
            wait: Wait for the node's answer. Chunks without an answer by the deadline count as `posted`.

        Returns:
            Counts of the chunks. Chunks without a slot by the deadline are skipped.

        Raises:
            UsageError: A size does not fit an extent.
        """
        result = PutResult()
        for part in self._parts(batches):
            result += self._put_part(group, part, wait=wait, deadline_s=deadline_s)
        return result

    def _parts(self, batches: Sequence[tuple[Batch, Values]]) -> Iterator[Sequence[tuple[Batch, Values]]]:
        """Yield all batches at once, or, if they take more than 1 / PUT_SHARE of the arena, in parts of this size."""
        most_nbytes = self._local.reader.arena.nbytes // PUT_SHARE
        if sum(len(batch.keys) * batch.nbytes for batch, _ in batches) <= most_nbytes:
            yield batches
            return
        for batch, values in batches:
            step = max(1, most_nbytes // slot_nbytes(batch.nbytes))
            for first in range(0, len(batch.keys), step):
                few = values.part(first, step) if isinstance(values, DirectValues) else values[first : first + step]
                yield [(_part_of(batch, first, step), few)]

    def _put_part(
        self, group: Namespace, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
    ) -> PutResult:
        connected, life = self.pipeline.connected, self.pipeline.life
        result = self._put_once(group, batches, wait=wait, deadline_s=deadline_s)
        stale = connected and (life != self.pipeline.life or group.digest not in self.supply.opened)
        if result.skipped and stale and time.monotonic() < deadline_s:  # for example after a restart of the node
            again = self._put_once(group, batches, wait=wait, deadline_s=deadline_s)
            ours = max(0, again.existed - result.existed)  # stored by the first attempt, whose answer was lost
            result = PutResult(again.stored + ours, again.existed - ours, again.skipped, again.reason, again.posted)
        return result

    def _put_once(
        self, group: Namespace, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
    ) -> PutResult:
        lents: list[LentBatch] = []
        try:
            for batch, values in batches:
                lent = self.lend(group, batch, deadline_s=deadline_s)
                lents.append(lent)
                if lent.slots:
                    lent.checksums = self._fill(lent, values).tobytes()
        except BaseException as error:  # for example, a chunk that is too large, or an interrupt
            self._undo(lents, error)
            raise
        result = sum((lent.result for lent in lents), PutResult())
        filled = [lent for lent in lents if lent.slots]
        return result + self._commit(group, filled, wait=wait, deadline_s=deadline_s) if filled else result

    def _fill(self, lent: LentBatch, values: Values) -> npt.NDArray[np.uint64]:
        if isinstance(values, DirectValues):
            return values.write(lent.positions, lent.views)
        return self._threads.fill(lent.views, [values[position] for position in lent.positions])

    def _missing(self, batch: Batch) -> list[int]:
        """Return the positions of the keys that this host's node lacks. For equal keys, return the first position."""
        ready = self._local.reader.ready(batch.keys, now_s=time.monotonic()).tolist()
        if False not in ready and not self._local.is_current():
            ready = [False] * len(ready)
        missing = [position for position, here in enumerate(ready) if not here]
        raw, first = chunk_keys.to_bytes(batch.keys), dict[bytes, int]()
        for position in missing:
            first.setdefault(raw[KEY_NBYTES * position : KEY_NBYTES * (position + 1)], position)
        return list(first.values())

    def _require_size(self, nbytes: int) -> None:
        most = self._local.reader.table.extent_nbytes
        if not 0 < nbytes <= most:
            raise UsageError(
                f"a chunk of {nbytes:,} bytes does not fit: at least 1, and at most extent_nbytes ({most:,}); "
                "raise extent_nbytes or cut the value into chunks"
            )

    def _commit(self, group: Namespace, filled: list[LentBatch], *, wait: bool, deadline_s: float) -> PutResult:
        """Send one Commit. If it cannot be sent, or slots belong to an earlier connection, all chunks are skipped."""
        commit, until_s = PendingCommit(self.supply, group, filled), max(deadline_s, time.monotonic() + LATE_S)
        commit.posted = not wait
        life = min(lent.life for lent in filled)
        try:
            with self.pipeline.locked(until_s):
                request = commit.request_locked()
            self._unanswered.add(commit)
            finish = partial(self._finish_locked, commit)
            posted = self.pipeline.post(request, finish, deadline_s=until_s, life=life, keys=commit.keys)
        except BaseException as error:  # the commit was not sent, or there was an interrupt: see `_undo`
            self._unanswered.discard(commit)
            self._undo(filled, error)
            if isinstance(error, _UNAVAILABLE):
                return PutResult(0, 0, commit.chunks, str(error))
            raise
        if wait:
            self.pipeline.wait(posted, deadline_s)
        with self.pipeline.lock:
            if wait and commit.result is not None:
                return commit.result
            commit.posted = True
        return PutResult(reason=NO_ANSWER if wait else "", posted=commit.chunks)

    def _undo(self, lents: Sequence[LentBatch], error: BaseException) -> None:
        """Put slots back into their pools, because their commit was not sent.

        After an interrupt, drop the connection instead, because it is unknown whether the commit was sent.
        """
        with self.pipeline.lock:
            self.pipeline.drop_if_interrupted_locked(error)
            for lent in lents:
                self.supply.put_back_locked(lent, lent.slots)

    def _finish_locked(self, commit: "PendingCommit", outcome: Outcome) -> None:
        self._unanswered.discard(commit)
        try:
            commit.finish_locked(outcome)
        finally:
            if commit.posted and commit.result is not None:
                self._results += commit.result

    # -- slots that the caller fills --------------------------------------------------------------------------------

    def lend(self, group: Namespace, batch: Batch, *, deadline_s: float) -> LentBatch:
        """Get slots for those chunks of a batch that this host's node lacks. If slots are lacking, `reason` says why.

        Raises:
            UsageError: The size does not fit an extent.
        """
        self._require_size(batch.nbytes)
        missing = self._missing(batch)
        lent = LentBatch(group, batch, existed=len(batch.keys) - len(missing))
        try:
            if missing:
                self.supply.pop(lent, len(missing), deadline_s)
        except _UNAVAILABLE as error:
            lent.reason = str(error)
        lent.positions = missing[: len(lent.slots)]
        return lent

    def commit_lent(self, lent: LentBatch, *, deadline_s: float) -> PutResult:
        """Commit slots that the caller has filled, and wait for the answer."""
        lent.checksums = checksums_of([[view] for view in lent.views])
        return self._commit(lent.group, [lent], wait=True, deadline_s=deadline_s)

    def prepare(self, group: Namespace, nbytes: int, count: int, *, deadline_s: float) -> None:
        """Request slots for `count` chunks that will be stored soon. Does not wait for the slots.

        Raises:
            PeerUnavailable: The node does not answer.
            UsageError: The size does not fit an extent.
        """
        self._require_size(nbytes)
        self.supply.prepare(group, nbytes, count, deadline_s)

    # -- posted chunks ----------------------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        """Wait for the outcomes of all sent commits.

        Returns:
            True: outcomes have arrived, so a new lookup may find more chunks. False: all commits had an outcome before
            this call, or some have no outcome by the deadline.
        """
        return bool(self._unanswered) and self.pipeline.wait_all(deadline_s)

    def flush(self, deadline_s: float) -> PutResult:
        """Wait for the answers to posted chunks. Return the sum of the results since the last call. Never raises.

        In the result, `posted` counts the chunks that have no answer by the deadline.
        """
        self.drain(deadline_s)
        with self.pipeline.lock:
            done, self._results = self._results, PutResult()
            waiting = sum(commit.chunks for commit in self._unanswered if commit.posted)
        return done + PutResult(posted=waiting)

    def close(self) -> None:
        """Give all slots back, and close the connection."""
        self.supply.close(time.monotonic() + CLOSE_S)


class PendingCommit:
    """A Commit message for filled slots, and its result.

    Attributes:
        chunks: Number of slots.
        keys: Number of keys in the message.
        result: The counts of the chunks. None: there is no answer and no error yet.
        posted: Whether `Writer.flush` returns the result, because no put waits for the answer.
    """

    def __init__(self, supply: SlotSupply, group: Namespace, filled: Sequence[LentBatch]) -> None:
        self._supply, self._group, self._filled = supply, group, filled
        self.chunks = sum(len(lent.slots) for lent in filled)
        self.keys = sum(lent.positions[-1] + 1 for lent in filled)
        self.result: PutResult | None = None
        self.posted = False

    def request_locked(self) -> messages.Commit:
        """Make the message. The message also requests slots in advance for pools that lack slots."""
        for lent in self._filled:
            assert lent.pool is not None
            lent.ahead = lent.pool.lacking()
            lent.pool.coming += lent.ahead
        return messages.Commit(tuple(map(_run_of, self._filled)), group=self._group.digest)

    def finish_locked(self, outcome: Outcome) -> None:
        """Set `result`. Put unused slots back into their pools. Give back the slots of the runs that the node refused.

        Raises:
            ProtocolError: The answer is wrong. All chunks count as skipped.
        """
        self.result = PutResult(0, 0, self.chunks, "the node's answer to a Commit is wrong")
        if isinstance(outcome, RayKVError):
            runs = (messages.CommittedRun(problem=str(outcome)),) * len(self._filled)
            if isinstance(outcome, LostError):
                self._supply.opened.discard(self._group.digest)  # the next put opens the group again
        else:
            runs = expect(messages.Committed, outcome).runs
        if len(runs) != len(self._filled):
            raise ProtocolError(self.result.reason)
        refused: list[Slot] = []
        results = [self._finish_run_locked(lent, run, refused) for lent, run in zip(self._filled, runs, strict=True)]
        self.result = sum(results, PutResult())
        self._supply.give_back_locked(refused)

    def _finish_run_locked(self, lent: LentBatch, run: messages.CommittedRun, refused: list[Slot]) -> PutResult:
        assert lent.pool is not None
        self._supply.add_locked(lent.pool, run.rows, run.offsets)
        unused: list[Slot] = []
        if run.problem:
            refused += lent.slots
        else:
            places = dict.fromkeys(array(run.unused, "<i4", len(run.unused) // 4).tolist())
            unused = [lent.slots[place] for place in places if 0 <= place < len(lent.slots)]
        self._supply.put_back_locked(lent, unused)
        if run.problem:
            return PutResult(0, 0, len(lent.slots), run.problem)
        return PutResult(len(lent.slots) - len(unused), len(unused))


def _part_of(batch: Batch, first: int, count: int) -> Batch:
    """Return `count` chunks of a batch, from index `first` on."""
    keys = batch.keys[first : first + count]
    if not batch.chained or not first:
        return replace(batch, keys=keys)
    return replace(batch, keys=keys, parent=batch.keys[first - 1 : first], depth=batch.depth + first)


def _run_of(lent: LentBatch) -> messages.Run:
    """Make the part of a Commit for one batch.

    This part has all keys of the batch up to the last filled slot. Keys without a slot are included, because each key
    of a chain is the parent of the next key.
    """
    batch, positions = lent.batch, lent.positions
    count = positions[-1] + 1
    every = len(positions) == count
    return messages.Run(
        chunk_keys.to_bytes(batch.keys[:count]),
        batch.nbytes,
        rows_of(lent.slots),
        lent.checksums,
        b"" if every else np.array(positions, np.int32).tobytes(),
        batch.chained,
        b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent),
        batch.depth,
        lent.ahead,
        *batch.hints,
    )
