"""What one node knows of a pack directory: its packs, their chunks, the tombstones. Not thread-safe."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raykv.memory.layout import MAX_NAMESPACES
from raykv.tier.file.folder import Name
from raykv.tier.file.tombstones import Tombstones
from raykv.tier.segments.format import Array, key_array
from raykv.tier.segments.index import Changes, Index
from raykv.types import KeyArray, Rows


@dataclass(eq=False, slots=True)
class Pack:
    """A file that this node knows. Rows of the index name it by its number.

    Attributes:
        nbytes: Space that it takes.
        mine: This node wrote it.
        known_s, touched_s: When this node learned of it, and marked it as used; monotonic.
    """

    name: Name
    number: int
    nbytes: int
    mine: bool
    known_s: float
    touched_s: float = -math.inf
    removed: bool = False


class Catalog:
    """Packs and tombstone files, by number and by the stem of their names, and an index of the packs' chunks."""

    def __init__(self, writer: str, *, rows: int) -> None:
        """Begin empty. `writer` is the name of this node. See `Index` for errors."""
        self.index = Index(rows, now_s=time.time())
        self.groups = GroupNumbers()
        self.packs: dict[int, Pack] = {}
        self.known: dict[str, Pack] = {}
        self.tombstones = Tombstones()
        self._writer, self._numbers = writer, 0
        self._changes = Changes()

    def own(self, rows: Rows) -> Rows:
        """Those of the rows whose chunks lie in packs that this node wrote."""
        mine = [pack.number for pack in self.packs.values() if pack.mine]
        owned: Rows = rows[np.isin(self.index.segment[rows], mine)]
        return owned

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `tier.base.Tier`; of packs that this node wrote."""
        keys = self._changes.take()
        rows = self.index.find_all(keys)
        here = (rows >= 0) & np.isin(rows, self.own(rows[rows >= 0]))
        return keys[here], keys[~here]

    # -- packs ------------------------------------------------------------------------------------------------------

    def add_pack(self, name: Name, nbytes: int) -> Pack:
        """Learn of a file, which takes this space."""
        if name.stem in self.known:
            return self.known[name.stem]
        pack = Pack(name, self._numbers, nbytes, name.writer == self._writer, time.monotonic())
        self._numbers += 1
        self.packs[pack.number] = self.known[name.stem] = pack
        return pack

    def remove_pack(self, pack: Pack) -> None:
        pack.removed = True
        if self.known.get(pack.name.stem) is not pack:
            return
        self.remove(self._rows_of(pack))
        del self.known[pack.name.stem], self.packs[pack.number]
        if pack.name.kind == "tombs":
            self.tombstones.remove(pack.name.sequence)

    def _rows_of(self, pack: Pack) -> Rows:
        return self.index.rows_where(self.index.segment[self.index.used()] == pack.number)

    def sequences(self, rows: Rows) -> Array:
        numbers, places = np.unique(self.index.segment[rows], return_inverse=True)
        sequences = np.array([self.packs[number].name.sequence for number in numbers.tolist()], np.int64)
        of_rows: Array = sequences[places]
        return of_rows

    # -- chunks -----------------------------------------------------------------------------------------------------

    def insert(self, pack: Pack, texts: tuple[bytes, ...], entries: Array) -> None:
        """Enter the chunks of a pack that no tombstone covers. Of two copies, that of the later pack counts."""
        index, sequence = self.index, pack.name.sequence
        if not len(entries):
            return
        groups = np.array(self.groups.of(texts, index.chunks), np.int64)
        entries = entries[(groups[entries["group"]] >= 0) & self.tombstones.uncovered(entries, texts, sequence)]
        rows = index.find_all(np.ascontiguousarray(entries["key"]))
        existing = np.flatnonzero(rows >= 0)
        later = self.sequences(rows[existing]) > sequence
        self.remove(rows[existing[~later]])
        entries = np.delete(entries, existing[later])
        while index.free_rows() < len(entries) and self._remove_oldest(sequence):
            pass
        rows = index.allocate(len(entries))
        entries = entries[: len(rows)]
        if len(rows):
            index.insert(rows, entries, groups[entries["group"]], pack.number)
            if pack.mine:
                self._changes.add(entries["key"])

    def _remove_oldest(self, sequence: int) -> bool:
        """Remove the chunks of the oldest pack from the index, if it is older than `sequence`. Its file stays."""
        index = self.index
        packs = [self.packs[number] for number in np.unique(index.segment[index.ready()]).tolist()]
        oldest = min(packs, key=lambda pack: pack.name.sequence, default=None)
        if oldest is None or oldest.name.sequence >= sequence:
            return False
        self.remove(self._rows_of(oldest))
        return True

    def remove(self, rows: Rows) -> None:
        """Take chunks, all different, out of the index."""
        if len(rows):
            self._changes.add(self.index.keys(self.own(rows)))
            self.index.remove(rows)

    def rows_of_group(self, text: bytes) -> Rows:
        return self.index.rows_of_group(self.groups.numbers.get(text, -1))

    def apply_tombstones(self, sequence: int, keys: Sequence[bytes], texts: Sequence[bytes]) -> None:
        """Delete these chunks and quota groups from all packs with a lower sequence."""
        if not (keys or texts):
            return
        self.tombstones.add(sequence, keys, texts)
        rows = [self.index.find_all(key_array(keys)), *(self.rows_of_group(text) for text in texts)]
        found = np.unique(np.concatenate(rows)).astype(np.int32)
        found = found[found >= 0]
        self.remove(found[self.sequences(found) < sequence])


class GroupNumbers:
    """Numbers of quota groups in this tier's index. The node's own numbers are few; other clusters have groups too."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.texts: dict[int, bytes] = {}

    def of(self, texts: Sequence[bytes], chunks: Array) -> list[int]:
        """The number of each, made if need be; -1 where there are too many quota groups.

        Args:
            chunks: Count of chunks under each number.
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
