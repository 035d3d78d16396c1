"""A simulated SSD below the cache of a replay. It records which chunks the SSD holds, without their bytes."""

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.memory.layout import TICKS_PER_S
from raykv.tier.admission import Admission

MOVED_SHARE: Final = 4
"""At most one chunk is moved within the SSD for every MOVED_SHARE chunks that memory writes to the SSD."""

Numbers = npt.NDArray[np.integer[Any]]


class Ssd:
    """A log of segments, like the SSD tier of a node.

    When the log is full, the oldest segment is reclaimed. A chunk of this segment moves to the end of the log if the
    chunk was read since its last write, and MOVED_SHARE allows the move. Otherwise the chunk is dropped. A chunk that
    is read into memory also stays on the SSD, so that memory can evict the chunk later without another write.

    Attributes:
        written: Number of chunks written from memory.
        moved: Number of chunks moved within the SSD.
        tokens: Number of tokens in the written and the moved chunks.
    """

    def __init__(self, capacity: int, segment: int, admission: Admission, token_nbytes: int) -> None:
        """Start empty. `capacity` and `segment` are in chunks. The log has at least two segments."""
        self._segment = max(1, min(segment, capacity // 2))
        self._most = max(2, capacity // self._segment)
        self._admission, self._token_nbytes = admission, token_nbytes
        self._segments: deque[list[int]] = deque([[]])
        self._held: dict[int, tuple[int, int, bool]] = {}  # maps a chunk to (tokens, reads, read since last write)
        self._refused: set[int] = set()  # chunks that were not admitted; `offer` adds one to their number of reads
        self.written = self.moved = self.tokens = 0

    def has(self, chunk: int) -> bool:
        return chunk in self._held

    def read(self, chunk: int) -> int:
        """Count a read of a chunk that the SSD holds. Return the chunk's number of reads, including this one."""
        tokens, reads, _ = self._held[chunk]
        self._held[chunk] = tokens, reads + 1, True
        return reads + 1

    def offer(self, chunks: list[int], reads: Numbers, parent_reads: Numbers, tokens: Numbers, now: int) -> None:
        """Write chunks that memory has evicted, if the SSD lacks them and `Admission.admit` accepts them.

        For each chunk, `reads` has its number of reads, `parent_reads` its parent's number of reads, and `tokens` its
        number of tokens.
        """
        new = np.array([chunk not in self._held for chunk in chunks], np.bool_)
        if not new.any():
            return
        nbytes = tokens[new].astype(np.int64) * self._token_nbytes
        again = reads + np.array([chunk in self._refused for chunk in chunks], np.int64)
        admitted = self._admission.admit(again[new], parent_reads[new], nbytes, now_s=now / TICKS_PER_S)
        self._refused.update(chunks[place] for place in np.flatnonzero(new)[~admitted].tolist())
        for place in np.flatnonzero(new)[admitted].tolist():
            self.written += 1
            self._append(chunks[place], int(tokens[place]), int(reads[place]))
            while len(self._segments) > self._most:
                self._reclaim(now)

    def _append(self, chunk: int, tokens: int, reads: int) -> None:
        if len(self._segments[-1]) == self._segment:
            self._segments.append([])
        self._segments[-1].append(chunk)
        self._held[chunk] = tokens, reads, False
        self.tokens += tokens

    def _reclaim(self, now: int) -> None:
        given_up = [(chunk, *self._held.pop(chunk)) for chunk in self._segments.popleft()]
        for chunk, tokens, reads, again in given_up:
            if again and self.moved * MOVED_SHARE < self.written:
                self.moved += 1
                self._append(chunk, tokens, reads)
                self._admission.spend(tokens * self._token_nbytes, now_s=now / TICKS_PER_S)
