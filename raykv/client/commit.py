"""One Commit of a writer: the request, and what its answer means for the slots and the chunks."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.client.pipeline import Outcome
from raykv.client.slot_pool import LentBatch, QuotaGroup, Slot, sum_of
from raykv.client.slot_supply import SlotSupply
from raykv.errors import LostError, ProtocolError, RayKVError, TransientError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array
from raykv.types import PutResult


class Filled(NamedTuple):
    """Slots that are written, and the checksum of each."""

    lent: LentBatch
    checksums: npt.NDArray[np.uint64]


class PendingCommit:
    """Filled slots, and the Commit that names them to the node.

    Attributes:
        chunks: How many.
        keys: How many the message has.
        result: None until there is an outcome.
        posted: Whether no call waits for the result: it is for `Writer.flush`.
    """

    def __init__(self, supply: SlotSupply, group: QuotaGroup, filled: Sequence[Filled]) -> None:
        """Args: filled: All of one connection."""
        self._supply, self._group, self._filled = supply, group, filled
        self.chunks = sum(len(each.lent.slots) for each in filled)
        self.keys = sum(each.lent.positions[-1] + 1 for each in filled)
        self.result: PutResult | None = None
        self.posted = False

    def request_locked(self) -> messages.Commit:
        """The message; it also requests the slots that the pools lack."""
        now_s, runs = time.monotonic(), []
        for lent, checksums in self._filled:
            assert lent.pool is not None
            lent.ahead = lent.pool.lacking(now_s)
            lent.pool.coming += lent.ahead
            runs.append(_run_of(lent, checksums))
        return messages.Commit(tuple(runs), group=self._group.digest)

    def withdraw_locked(self, reason: str) -> None:
        """The commit was not sent: the slots return to their pools."""
        for lent, _ in self._filled:
            assert lent.pool is not None
            lent.pool.coming -= lent.ahead
            self._supply.put_back_locked(lent, lent.slots)
        self.result = PutResult(0, 0, self.chunks, reason)

    def finish_locked(self, outcome: Outcome) -> None:
        """Take in the outcome: slots that were not used return to their pools; refused ones go back to the node."""
        answer = outcome if isinstance(outcome, messages.Committed) else None
        if answer is not None and len(answer.runs) != len(self._filled):
            answer = None
        error = outcome if isinstance(outcome, RayKVError) else ProtocolError("the node's answer to a Commit is wrong")
        self.result = PutResult(0, 0, self.chunks, str(error))  # unless all of the answer can be read
        refused: list[Slot] = []
        total = PutResult(0, 0, 0)
        for number, (lent, _) in enumerate(self._filled):
            assert lent.pool is not None
            lent.pool.coming -= lent.ahead
            if answer is not None:
                total = sum_of(total, self._finish_run_locked(lent, answer.runs[number], refused))
            else:
                refused += lent.slots
        if answer is not None:
            self.result = total
        elif isinstance(error, LostError):
            self._supply.lost_group(self._group)
        elif isinstance(error, ProtocolError):
            raise error
        if answer is not None or not isinstance(error, TransientError):
            self._supply.give_back_locked(refused)

    def _finish_run_locked(self, lent: LentBatch, run: messages.CommittedRun, refused: list[Slot]) -> PutResult:
        assert lent.pool is not None
        self._supply.add_locked(lent.pool, run.rows, run.offsets)
        if run.problem:
            refused += lent.slots
            return PutResult(0, 0, len(lent.slots), run.problem)
        places = array(run.unused, "<i4", len(run.unused) // 4).tolist()
        unused = [lent.slots[place] for place in places if 0 <= place < len(lent.slots)]
        self._supply.put_back_locked(lent, unused)
        return PutResult(len(lent.slots) - len(unused), len(unused), 0)


def _run_of(lent: LentBatch, checksums: npt.NDArray[np.uint64]) -> messages.Run:
    """The keys up to the last one that is stored: an earlier one may be the parent of a later one."""
    batch, positions = lent.batch, lent.positions
    count = positions[-1] + 1
    every = len(positions) == count
    return messages.Run(
        chunk_keys.to_bytes(batch.keys[:count]),
        batch.nbytes,
        np.array([row for row, _ in lent.slots], np.int32).tobytes(),
        checksums.tobytes(),
        b"" if every else np.array(positions, np.int32).tobytes(),
        batch.chained,
        b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent),
        batch.depth,
        lent.ahead,
        *batch.hints,
    )
