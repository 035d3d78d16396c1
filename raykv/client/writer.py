"""Stores chunks in this host's node: get slots lent, fill the slots, commit.

The writer has a separate connection, so a waiting reader never blocks a writer. The node lends slots before they are
needed (`raykv.client.slot_pool`). A put copies and hashes in one pass, and sends one Commit. The answer lends the next
slots. A put that does not wait leaves the answer to a later call.

A call that reaches its deadline does not lose the connection or its leases: see `raykv.client.pipeline`.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from raykv.client.commit import Filled, PendingCommit
from raykv.client.local_connection import LocalConnection
from raykv.client.pipeline import Outcome, Posted
from raykv.client.slot_pool import LentBatch, QuotaGroup, sum_of
from raykv.client.slot_supply import NO_ANSWER, SlotSupply
from raykv.errors import CapacityError, LostError, TransientError, UsageError
from raykv.memory.copying import CopyThreads, checksum_of
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.transport.forking import drop_after_fork
from raykv.types import Batch, PutResult

Values = Sequence[Sequence[memoryview]]
"""Bytes of several chunks: for each chunk a list of views that are joined in order."""

LATE_S: Final = 0.001
"""Least time that a call may wait to send the commit of filled slots, even after its deadline."""
CLOSE_S: Final = 0.2
"""How long `close` waits to give slots back. Slots that are not given back go into quarantine."""
_UNAVAILABLE: Final = (TransientError, CapacityError, LostError)


class Writer:
    """Stores chunks of one process in the node of its host. Thread-safe."""

    def __init__(self, local: LocalConnection, threads: CopyThreads, *, retry_s: float) -> None:
        """Connect at first use.

        Args:
            threads: Threads for large copies.
            retry_s: Time without a new connection attempt after a failed one.
        """
        self._local, self._threads = local, threads
        self.supply = SlotSupply(local, retry_s=retry_s)
        self._pipeline = self.supply.pipeline
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Drop the posted chunks: they belong to the parent."""
        self._results, self._unanswered = PutResult(0, 0, 0), set[PendingCommit]()

    @property
    def posted(self) -> bool:
        """Whether commits of this writer are still without an answer."""
        return bool(self._unanswered)

    @property
    def epoch(self) -> int:
        """The greatest epoch in any answer so far."""
        return self._pipeline.epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._pipeline.epoch = value

    def put(
        self, group: QuotaGroup, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
    ) -> PutResult:
        """Store batches with one Commit.

        Args:
            wait: Wait for the node's answer. Chunks without an answer by the deadline count as `posted`.

        Returns:
            Counts of the chunks. Chunks without a slot by the deadline are skipped.

        Raises:
            UsageError: A size does not fit an extent.
        """
        for batch, _ in batches:
            self._require_size(batch.nbytes)
        connected, life = self._pipeline.connected, self._pipeline.life
        result = self._put_once(group, batches, wait=wait, deadline_s=deadline_s)
        stale = connected and (life != self._pipeline.life or not self.supply.knows(group))
        if result.skipped and stale and time.monotonic() < deadline_s:  # for example after a restart of the node
            again = self._put_once(group, batches, wait=wait, deadline_s=deadline_s)
            ours = max(0, again.existed - result.existed)  # stored by the first attempt, whose answer was lost
            result = PutResult(again.stored + ours, again.existed - ours, again.skipped, again.reason, again.posted)
        return result

    def _put_once(
        self, group: QuotaGroup, batches: Sequence[tuple[Batch, Values]], *, wait: bool, deadline_s: float
    ) -> PutResult:
        every: list[LentBatch] = []
        filled: list[Filled] = []
        try:
            for batch, values in batches:
                lent = self.lend(group, batch, deadline_s=deadline_s)
                every.append(lent)
                if lent.slots:
                    chosen = [values[position] for position in lent.positions]
                    filled.append(Filled(lent, self._threads.fill(lent.views, chosen)))
        except BaseException as error:
            with self._pipeline.lock:
                self._pipeline.drop_if_interrupted_locked(error)
                for lent in every:
                    self.supply.put_back_locked(lent, lent.slots)
            raise
        result = PutResult(0, 0, 0)
        for lent in every:
            result = sum_of(result, PutResult(0, lent.existed, lent.skipped, lent.reason))
        return sum_of(result, self._commit(group, filled, wait=wait, deadline_s=deadline_s)) if filled else result

    def _missing(self, batch: Batch) -> list[int]:
        """Return the positions of the keys that are not stored on this host, each key once."""
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

    def _commit(self, group: QuotaGroup, filled: list[Filled], *, wait: bool, deadline_s: float) -> PutResult:
        """Send one Commit. Skip the chunks whose slots belong to an earlier connection."""
        life = filled[-1].lent.life
        current = [each for each in filled if each.lent.life == life]
        lost = sum(len(each.lent.slots) for each in filled) - sum(len(each.lent.slots) for each in current)
        result = PutResult(0, 0, lost, "the connection that lent the slots broke" if lost else "")
        commit = PendingCommit(self.supply, group, current)
        commit.posted = not wait
        posted = self._post(commit, life, max(deadline_s, time.monotonic() + LATE_S))
        if posted is None or (wait and self._pipeline.wait(posted, deadline_s)):
            assert commit.result is not None
            return sum_of(result, commit.result)
        with self._pipeline.lock:
            if wait and commit.result is not None:
                return sum_of(result, commit.result)
            commit.posted = True
        return sum_of(result, PutResult(0, 0, 0, NO_ANSWER if wait else "", commit.chunks))

    def _post(self, commit: PendingCommit, life: int, deadline_s: float) -> Posted | None:
        """Send a commit. Returns None if it was not sent; the chunks are skipped then."""
        try:
            with self._pipeline.locked(deadline_s):
                request = commit.request_locked()
            self._unanswered.add(commit)
            finish = partial(self._finish_locked, commit)
            return self._pipeline.post(request, finish, deadline_s=deadline_s, life=life, keys=commit.keys)
        except BaseException as error:
            with self._pipeline.lock:
                self._pipeline.drop_if_interrupted_locked(error)
                self._unanswered.discard(commit)
                commit.withdraw_locked(str(error))
            if isinstance(error, _UNAVAILABLE):
                return None
            raise

    def _finish_locked(self, commit: PendingCommit, outcome: Outcome) -> None:
        self._unanswered.discard(commit)
        commit.finish_locked(outcome)
        if commit.posted and commit.result is not None:
            self._results = sum_of(self._results, commit.result)

    # -- slots that the caller fills --------------------------------------------------------------------------------

    def lend(self, group: QuotaGroup, batch: Batch, *, deadline_s: float) -> LentBatch:
        """Get slots for the chunks that are not stored on this host. If there are too few, `reason` says why.

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
        checksums = np.array([checksum_of([view]) for view in lent.views], np.uint64)
        return self._commit(lent.group, [Filled(lent, checksums)], wait=True, deadline_s=deadline_s)

    def prepare(self, group: QuotaGroup, nbytes: int, count: int, *, deadline_s: float) -> None:
        """Request slots for `count` chunks that will be stored soon. Does not wait for the slots.

        Raises:
            PeerUnavailable: The node does not answer.
            UsageError: The size does not fit an extent.
        """
        self._require_size(nbytes)
        self.supply.prepare(group, nbytes, count, deadline_s)

    # -- posted chunks ----------------------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        """Wait for the answers to all commits. True: new answers arrived, so the caller should look up again."""
        return self.posted and self._pipeline.wait_all(deadline_s)

    def flush(self, deadline_s: float) -> PutResult:
        """Wait for the posted chunks. Returns their results since the last call. Never raises.

        `posted` counts the chunks that have no answer by the deadline.
        """
        self.drain(deadline_s)
        with self._pipeline.lock:
            done, self._results = self._results, PutResult(0, 0, 0)
            waiting = sum(commit.chunks for commit in self._unanswered if commit.posted)
        return sum_of(done, PutResult(0, 0, 0, "", waiting))

    def close(self) -> None:
        """Give all slots back, and close the connection."""
        self.supply.close(time.monotonic() + CLOSE_S)
