"""What one node knows of a directory of packs: which there are, what lies in them, what is gone. Not thread-safe."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from raykv.memory.table import MAX_NAMESPACES
from raykv.protocol.chunk_keys import empty
from raykv.tier.file.packs import Name
from raykv.tier.file.tombstones import Told
from raykv.tier.segments.format import Array
from raykv.tier.segments.index import Index, key_array
from raykv.types import KeyArray, Rows

CHANGES: Final = 1 << 22
"""Keys that came or went, kept until somebody asks; older ones are forgotten beyond it."""


@dataclass(eq=False, slots=True)
class Pack:
    """A file that is known here.

    Attributes:
        number: By which rows of the index name it.
        nbytes: Space that it takes.
        mine: This node wrote it.
        known_s, touched_s: When we learned of it, and marked it as used, by the monotonic clock.
    """

    name: Name
    number: int
    nbytes: int
    mine: bool
    known_s: float
    touched_s: float = -math.inf


class Catalog:
    """Packs, and an index of their chunks.

    Attributes:
        packs: By their numbers, by which rows of the index name them; also files that tell what is gone.
        known: The same, by the stems of their names.
        names: Of quota groups, as this index counts them.
    """

    def __init__(self, writer: str, *, rows: int, now_s: float) -> None:
        """Begin empty.

        Args:
            writer: Name of this node.
            now_s: By the wall clock.

        Raises:
            ConfigError: No memory for so many rows.
        """
        self.index = Index(rows, now_s=now_s)
        self.names = AccountNumbers()
        self.packs: dict[int, Pack] = {}
        self.known: dict[str, Pack] = {}
        self.told = Told()
        self._writer, self._numbers = writer, 0
        self._came: deque[KeyArray] = deque()
        self._went: deque[KeyArray] = deque()

    def own(self, rows: Rows) -> Rows:
        """Those of the rows whose chunks lie in packs that this node wrote."""
        mine = [pack.number for pack in self.packs.values() if pack.mine]
        owned: Rows = rows[np.isin(self.index.segment[rows], mine)]
        return owned

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `tier.base.Tier`; of packs that this node wrote."""
        came, went = [empty(), *self._came], [empty(), *self._went]
        self._came.clear()
        self._went.clear()
        return np.concatenate(came), np.concatenate(went)

    def know(self, name: Name, nbytes: int) -> Pack:
        """There is this file; it takes so much room."""
        if name.stem in self.known:
            return self.known[name.stem]
        mine = name.writer == self._writer
        pack = Pack(name, self._numbers, nbytes, mine, time.monotonic())
        self._numbers += 1
        self.packs[pack.number] = self.known[name.stem] = pack
        return pack

    def heed(self, sequence: int, keys: Sequence[bytes], texts: Sequence[bytes]) -> None:
        """These are gone from all packs begun before."""
        if not (keys or texts):
            return
        self.told.note(sequence, keys, texts)
        rows = [self.index.look_all(key_array(keys)) if keys else np.zeros(0, np.int32)]
        rows += [self.rows_of_account(text) for text in texts]
        found = np.unique(np.concatenate(rows)).astype(np.int32)
        found = found[found >= 0]
        self.remove(found[self.sequences(found) < sequence])

    def sequences(self, rows: Rows) -> Array:
        """When the pack of each row was begun."""
        numbers, places = np.unique(self.index.segment[rows], return_inverse=True)
        sequences = np.array([self.packs[number].name.sequence for number in numbers.tolist()], np.int64)
        told: Array = sequences[places]
        return told

    def enter(self, pack: Pack, texts: tuple[bytes, ...], entries: Array) -> None:
        """Enter those of a pack's chunks that nothing speaks against. Of two of one key, that of the later pack."""
        index, sequence = self.index, pack.name.sequence
        if not len(entries):
            return
        groups = np.array(self.names.take(texts, index.chunks), np.int64)
        entries = entries[(groups[entries["group"]] >= 0) & self.told.living(entries, texts, sequence)]
        rows = index.look_all(np.ascontiguousarray(entries["key"]))
        there = np.flatnonzero(rows >= 0)
        later = self.sequences(rows[there]) > sequence
        self.remove(rows[there[~later]])
        entries = np.delete(entries, there[later])
        while index.free_rows() < len(entries) and self._shed(sequence):
            pass
        rows = index.take(len(entries))
        entries = entries[: len(rows)]
        if len(rows):
            index.enter(rows, entries, groups[entries["group"]], pack.number)
            if pack.mine:
                self._note(self._came, np.ascontiguousarray(entries["key"]))

    def _shed(self, sequence: int) -> bool:
        """Forget the chunks of the oldest pack, if it is older than this, for rows. Its file stays."""
        index = self.index
        packs = [self.packs[number] for number in np.unique(index.segment[index.ready()]).tolist()]
        oldest = min(packs, key=lambda pack: pack.name.sequence, default=None)
        if oldest is None or oldest.name.sequence >= sequence:
            return False
        self.remove(index.rows_where(index.segment[index.used()] == oldest.number))
        return True

    def rows_of_account(self, text: bytes) -> Rows:
        """Rows of its chunks."""
        number = self.names.numbers.get(text, -1)
        return self.index.rows_where(self.index.columns.namespace[self.index.used()] == number)

    def remove(self, rows: Rows) -> None:
        """Take chunks out of the index; all different."""
        if len(rows):
            self._note(self._went, self.index.keys(self.own(rows)))
            self.index.remove(rows)

    def _note(self, changes: deque[KeyArray], keys: KeyArray) -> None:
        changes.append(keys)
        while len(changes) > 1 and sum(map(len, changes)) > CHANGES:
            changes.popleft()

    def lose(self, pack: Pack) -> None:
        """A file is gone."""
        if self.known.get(pack.name.stem) is not pack:
            return
        self.remove(self.index.rows_where(self.index.segment[self.index.used()] == pack.number))
        del self.known[pack.name.stem], self.packs[pack.number]
        if pack.name.kind == "gone":
            self.told.forget(pack.name.sequence)


class AccountNumbers:
    """Numbers of quota groups in this tier's index: others than the node's, which has few, and none for foreign ones."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.texts: dict[int, bytes] = {}

    def take(self, texts: Sequence[bytes], chunks: Array) -> list[int]:
        """The number of each, made if need be; -1 where there are too many quota groups.

        Args:
            chunks: How many count under each number.
        """
        for text in texts:
            if text in self.numbers:
                continue
            number = len(self.texts)
            if number >= MAX_NAMESPACES:
                unused = (each for each in range(MAX_NAMESPACES) if not chunks[each] and self.texts[each] not in texts)
                number = next(unused, -1)
                if number < 0:
                    continue
                del self.numbers[self.texts[number]]
            self.numbers[text], self.texts[number] = number, text
        return [self.numbers.get(text, -1) for text in texts]
