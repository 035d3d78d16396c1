"""What one node knows of a pack directory: packs, their chunks, tombstones. Not thread-safe."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from raykv.memory.layout import MAX_NAMESPACES
from raykv.tier.file.folder import Name
from raykv.tier.segments.format import Array, key_array, raw_keys
from raykv.tier.segments.index import Changes, Index
from raykv.types import Bits, KeyArray, Rows

MAX_KEYS: Final = 1 << 20
"""At most this many tombstones of keys are in memory, and at most this many pending ones. The oldest are dropped."""


@dataclass(eq=False, slots=True)
class Pack:
    """A pack, part or tombstone file that this node knows.

    Attributes:
        number: The file's number in `Index.segment`.
        nbytes: Space that the file takes.
        mine: Whether this node wrote the file.
        known_s: Monotonic time when this node found the file.
        touched_s: Monotonic time of this node's last `Folder.touch` of the file.
        removed: Whether `Catalog.remove_pack` has removed the file from the catalog.
    """

    name: Name
    number: int
    nbytes: int
    mine: bool
    known_s: float
    touched_s: float = -math.inf
    removed: bool = False


class Catalog:
    """Packs and tombstone files, and an index of all chunks in the packs.

    Attributes:
        packs: All files that this node knows, by `Pack.number`.
        known: The same files, by `Name.stem`.
        texts: Quota groups as JSON, in the order of their numbers in the index. The node has other numbers for its
            groups, because packs can also hold groups of other clusters.
        groups: Number of each quota group in the index, by its JSON.
    """

    def __init__(self, writer: str, *, rows: int) -> None:
        """Begin empty. `writer` is the name of this node. Raises ConfigError if memory is short for the rows."""
        self.index = Index(rows, now_s=time.time())
        self.texts: list[bytes] = []
        self.groups: dict[bytes, int] = {}
        self.packs: dict[int, Pack] = {}
        self.known: dict[str, Pack] = {}
        self.tombstones = Tombstones()
        self._writer, self._numbers = writer, 0
        self._changes = Changes()

    def own(self, rows: Rows) -> Rows:
        """Return those of `rows` whose chunks are in packs that this node wrote."""
        return rows[np.isin(self.index.segment[rows], [pack.number for pack in self.packs.values() if pack.mine])]

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `tier.base.Tier`. Leaves out chunks in packs that other nodes wrote."""
        keys = self._changes.take()
        rows = self.index.find_all(keys)
        here = (rows >= 0) & np.isin(rows, self.own(rows[rows >= 0]))
        return keys[here], keys[~here]

    def add_pack(self, name: Name, nbytes: int) -> Pack:
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
        return np.array([self.packs[number].name.sequence for number in numbers.tolist()], np.int64)[places]

    def insert(self, pack: Pack, texts: tuple[bytes, ...], entries: Array) -> None:
        """Enter those chunks of a pack that no tombstone covers. If a chunk is in two packs, the later pack wins.

        `entries` (`format.ENTRY`) and `texts` are from the record of the pack.
        """
        index, sequence = self.index, pack.name.sequence
        if not len(entries):
            return
        groups = np.array([self._group(text) for text in texts], np.int64)
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

    def _group(self, text: bytes) -> int:
        """Return a quota group's number in the index. A new group gets a free number, or -1 if none is free."""
        if text not in self.groups and len(self.texts) < MAX_NAMESPACES:
            self.groups[text] = len(self.texts)
            self.texts.append(text)
        return self.groups.get(text, -1)

    def _remove_oldest(self, sequence: int) -> bool:
        """Remove the oldest pack's chunks from the index. Returns False if no pack is older than `sequence`."""
        index = self.index
        packs = [self.packs[number] for number in np.unique(index.segment[index.ready()]).tolist()]
        oldest = min(packs, key=lambda pack: pack.name.sequence, default=None)
        if oldest is None or oldest.name.sequence >= sequence:
            return False
        self.remove(self._rows_of(oldest))
        return True

    def remove(self, rows: Rows) -> None:
        if len(rows):
            self._changes.add(self.index.keys(self.own(rows)))
            self.index.remove(rows)

    def rows_of_group(self, text: bytes) -> Rows:
        return self.index.rows_of_group(self.groups.get(text, -1))

    def apply_tombstones(self, sequence: int, keys: Sequence[bytes], texts: Sequence[bytes]) -> None:
        """Add tombstones of keys and quota groups. Remove from the index the chunks that they cover."""
        if not (keys or texts):
            return
        self.tombstones.add(sequence, keys, texts)
        rows = [self.index.find_all(key_array(keys)), *(self.rows_of_group(text) for text in texts)]
        found = np.unique(np.concatenate(rows)).astype(np.int32)
        found = found[found >= 0]
        self.remove(found[self.sequences(found) < sequence])


class Tombstones:
    """Deleted keys and dropped quota groups. Pending tombstones are not in a file yet.

    A tombstone covers the chunks of its key or group in all packs with a lower sequence than its own.

    Attributes:
        latest: The highest sequence of a tombstone so far.
        pending_keys: Keys of pending tombstones.
        pending_texts: Quota groups of pending tombstones, as JSON.
        pending_sequence: The next tombstone file must have at least this sequence. With a lower sequence, the file
            would not cover all chunks that the pending tombstones delete.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}
        self._texts: dict[bytes, int] = {}
        self.latest = self.pending_sequence = 0
        self.pending_keys: dict[bytes, None] = {}
        self.pending_texts: dict[bytes, None] = {}

    @property
    def pending(self) -> bool:
        return bool(self.pending_keys or self.pending_texts)

    def add_pending(self, sequence: int, keys: Iterable[bytes] = (), texts: Iterable[bytes] = ()) -> None:
        self.pending_sequence = max(self.pending_sequence, sequence)
        self.pending_keys.update(dict.fromkeys(keys))
        self.pending_texts.update(dict.fromkeys(texts))
        while len(self.pending_keys) > MAX_KEYS:
            del self.pending_keys[next(iter(self.pending_keys))]

    def remove_pending(self, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        for pending, names in ((self.pending_keys, keys), (self.pending_texts, texts)):
            for name in names:
                pending.pop(name, None)

    def add(self, sequence: int, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        for known, names in ((self._keys, keys), (self._texts, texts)):
            for name in names:
                known[name] = max(sequence, known.pop(name, 0))
        self.latest = max(self.latest, sequence)
        while len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def remove(self, sequence: int) -> None:
        self._keys = {key: latest for key, latest in self._keys.items() if latest != sequence}
        self._texts = {text: latest for text, latest in self._texts.items() if latest != sequence}

    def of(self, sequences: set[int]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys and the quota groups whose latest tombstone has one of these sequences."""
        return (
            [key for key, latest in self._keys.items() if latest in sequences],
            [text for text, latest in self._texts.items() if latest in sequences],
        )

    def covers(self, key: bytes, text: bytes, sequence: int) -> bool:
        """Whether a tombstone, pending or not, covers a chunk of this key and group in a pack of this sequence."""
        if key in self.pending_keys or text in self.pending_texts:
            return True
        return max(self._keys.get(key, 0), self._texts.get(text, 0)) > sequence

    def uncovered(self, entries: Array, texts: Sequence[bytes], sequence: int) -> Bits:
        """Return which entries (`format.ENTRY`) of a pack no tombstone covers. `texts`: quota groups of the record."""
        alive: Bits = np.array([self._texts.get(text, 0) < sequence for text in texts], np.bool_)[entries["group"]]
        if self._keys:
            alive &= np.array([self._keys.get(key, 0) < sequence for key in raw_keys(entries["key"])], np.bool_)
        return alive
