"""Reads chunks of packs into the arena. See `raykv.tier.file.tier`."""

import time
from typing import Final

import numpy as np

from raykv.tier.file.catalog import Pack
from raykv.tier.file.folder import VANISHED
from raykv.tier.file.state import State
from raykv.tier.segments.format import BLOCK_NBYTES
from raykv.tier.segments.requests import Run

READ_NBYTES: Final = 8 << 20
"""Neighbours in a pack are read by one call up to this size."""
QUEUED_READS: Final = 4096
"""Chunks that may wait to be read."""
TOUCH_S: Final = 60.0
"""A pack that is read is marked as used this often, at most."""


class Reader:
    """See the module."""

    def __init__(self, state: State) -> None:
        self._state = state

    def has_room(self, count: int) -> bool:
        return not self._state.reading or self._state.reading + count <= QUEUED_READS

    def read(self, run: Run) -> None:
        """On a thread: read a run into the arena, and verify it."""
        state, problem, got = self._state, None, 0
        with state.lock:
            pack, views = state.catalog.packs.get(run.segment), run.views(state.arena)
        try:
            if pack is not None:
                got = state.folder.read(pack.name, run.block * BLOCK_NBYTES, views)
        except OSError as error:
            problem = error
        right = run.verify(views, got)
        if problem is not None and problem.errno not in VANISHED:
            state.fail(problem, reading=True)
        with state.lock:
            state.reading -= len(run.pieces)
            index, same, rows = state.catalog.index, run.unchanged(state.catalog.index), run.rows
            if problem is not None and problem.errno in VANISHED and pack is not None:
                state.catalog.remove_pack(pack)
            else:
                wrong = np.unique(rows[~right & same])
                state.counts["corrupt"] += len(wrong) if problem is None else 0
                state.catalog.remove(wrong)
                index.touch(np.unique(rows[right & same]), now_s=time.time())
            lengths = np.array([piece.nbytes for piece in run.pieces])
            state.counts["read_nbytes"] += int(lengths[right].sum())
            run.finish(right.tolist())
        if pack is not None:
            self._mark_used(pack)

    def _mark_used(self, pack: Pack) -> None:
        now_s = time.monotonic()
        if pack.name.kind == "pack" and now_s - pack.touched_s > TOUCH_S:
            pack.touched_s = now_s
            try:
                self._state.folder.touch(pack.name)
            except OSError:
                pass  # it is gone, or the directory is read-only
