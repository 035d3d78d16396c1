"""The format of segments and packs: files with batches of chunks. This module does no I/O.

A segment is a file of fixed size, cut into blocks of BLOCK_NBYTES. It is filled from the front, batch by batch:

    [record][chunk][chunk] .. [record][chunk] ..                          .. [summary]

A batch is a record and its chunks. The record lists the content of the batch and the start of the next batch. Each
chunk begins at a block. Records also hold tombstones: deleted keys and dropped quota groups. A tombstone covers the
chunks of its key or group in earlier batches of its segment, and in all segments with a lower sequence number. Covered
chunks count as deleted.

A full segment is sealed by a summary: one record with the content of all records, at the end of the file. A starting
tier reads only the summary. If the summary is missing or damaged, the tier reads the batches in order, up to the first
damaged record.

A checksum (xxh3-64) covers each record with its padding. A record with a wrong checksum is ignored. Each entry has the
checksum of its chunk. Every read of a chunk verifies this checksum.

A freed file is used again, and may still have records of its earlier use. Each use of a file has its own pair of
incarnation and sequence number. So a reader recognizes the old records.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.protocol.chunk_keys import from_bytes
from raykv.types import KeyArray

MAGIC: Final = 0x3147_4553_564B_5941  # "AYKVSEG1"
LAYOUT_VERSION: Final = 1
BLOCK_NBYTES: Final = SLOT_ALIGNMENT_NBYTES
"""The unit of direct I/O. Slots of the arena begin and end at multiples of this unit."""
TAIL_BLOCKS: Final = 32
"""Blocks in the first read of a summary: enough for about 1 800 chunks. A longer summary takes a second read."""
BATCH, SUMMARY = 0, 1

HEAD: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("layout_version", "<u4"),
        ("kind", "<u4"),
        ("incarnation", "<u8"),
        ("sequence", "<u8"),
        ("number", "<u4"),
        ("blocks", "<u4"),
        ("next_block", "<u4"),
        ("segment_blocks", "<u4"),
        ("texts", "<u4"),
        ("texts_nbytes", "<u4"),
        ("entries", "<u4"),
        ("deleted", "<u4"),
        ("dropped", "<u4"),
        ("reserved", "<u4", 3),
        ("digest", "<u8"),
    ]
)
"""The first bytes of a record; see `Record`. `digest` is the record's checksum, computed with 0 in this field."""
ENTRY: Final = np.dtype(
    [
        ("key", "<u8", 2),
        ("parent", "<u8", 2),
        ("checksum", "<u8"),
        ("expires_s", "<f8"),
        ("nbytes", "<u4"),
        ("block", "<u4"),
        ("depth", "<u4"),
        ("reads", "<u4"),
        ("batch", "<u4"),
        ("group", "<u2"),
        ("chained", "<u2"),
    ]
)
"""A chunk in a record. `block`: its first block in the segment. `batch`: number of its batch. `group`: index into the
record's texts. `chained`: 1 if the chunk has a preceding chunk in its chain. `parent`: key of that preceding chunk."""
DELETED: Final = np.dtype([("key", "<u8", 2), ("batch", "<u4"), ("reserved", "<u4")])
DROPPED: Final = np.dtype([("group", "<u4"), ("batch", "<u4")])
_FOOT: Final = np.dtype([("magic", "<u8"), ("blocks", "<u8")])
"""The last bytes of a record. `blocks` is the record's length. A reader needs it to find where a summary begins."""

Array = npt.NDArray[Any]
Read = Callable[[int, int], memoryview]
"""Takes (offset, nbytes). Returns bytes of a segment, fewer at the file's end. The next call may overwrite them."""


class Counts(NamedTuple):
    entries: int = 0
    deleted: int = 0
    dropped: int = 0
    texts: frozenset[bytes] = frozenset()

    def plus(self, other: "Counts") -> "Counts":
        entries, deleted, dropped = (mine + more for mine, more in zip(self[:3], other[:3], strict=True))
        return Counts(entries, deleted, dropped, self.texts | other.texts)

    def blocks(self) -> int:
        nbytes = HEAD.itemsize + sum(2 + len(text) for text in self.texts) + _FOOT.itemsize
        nbytes += self.entries * ENTRY.itemsize + self.deleted * DELETED.itemsize + self.dropped * DROPPED.itemsize
        return blocks_of(nbytes)


class Record(NamedTuple):
    """The content of one record.

    Attributes:
        kind: BATCH or SUMMARY.
        incarnation, sequence: A pair of numbers that no other use of the file has.
        number: Index of the batch in its segment; in a summary, the number of batches.
        next_block: First block of the next batch.
        texts: Quota groups as JSON, without duplicates. `group` in ENTRY and DROPPED is an index into `texts`.
        entries, deleted, dropped: Arrays of ENTRY, DELETED and DROPPED.
    """

    kind: int
    incarnation: int
    sequence: int
    number: int
    next_block: int
    segment_blocks: int
    texts: tuple[bytes, ...]
    entries: Array
    deleted: Array
    dropped: Array

    def counts(self) -> Counts:
        return Counts(len(self.entries), len(self.deleted), len(self.dropped), frozenset(self.texts))

    def blocks(self) -> int:
        return self.counts().blocks()

    def dropped_texts(self) -> list[bytes]:
        return [self.texts[group] for group in np.unique(self.dropped["group"]).tolist()]


def blocks_of(nbytes: int) -> int:
    return max(1, -(-nbytes // BLOCK_NBYTES))


def encode(record: Record, target: memoryview) -> int:
    """Write a record to the front of `target`, which must be large enough. Returns the record's length in bytes."""
    blocks = record.blocks()
    nbytes = blocks * BLOCK_NBYTES
    head = np.zeros((), HEAD)
    head["magic"], head["layout_version"], head["blocks"] = MAGIC, LAYOUT_VERSION, blocks
    for field in ("kind", "incarnation", "sequence", "number", "next_block", "segment_blocks"):
        head[field] = getattr(record, field)
    texts = b"".join(len(text).to_bytes(2, "little") + text for text in record.texts)
    head["texts"], head["texts_nbytes"] = len(record.texts), len(texts)
    head["entries"], head["deleted"], head["dropped"] = record.counts()[:3]
    foot = np.array((MAGIC, blocks), _FOOT)
    body = head.tobytes() + texts + record.entries.tobytes() + record.deleted.tobytes() + record.dropped.tobytes()
    target[: len(body)] = body
    target[len(body) : nbytes] = bytes(nbytes - len(body) - _FOOT.itemsize) + foot.tobytes()
    head["digest"] = xxhash.xxh3_64_intdigest(target[:nbytes])
    target[: HEAD.itemsize] = head.tobytes()
    return nbytes


def claimed_blocks(first: memoryview) -> int:
    """Read the unverified length of a record, in blocks, from its first block. 0 if `first` does not begin a record."""
    if len(first) < BLOCK_NBYTES:
        return 0
    head = np.frombuffer(first, HEAD, 1)[0]
    return int(head["blocks"]) if head["magic"] == MAGIC and head["layout_version"] == LAYOUT_VERSION else 0


def decode(view: memoryview) -> Record | None:
    """Decode the record that fills `view`; None if the record is damaged. The result shares no memory with `view`.

    A checksum proves no honest writer. So a record whose content contradicts itself counts as damaged, too.
    """
    raw = bytearray(view)
    if len(raw) < BLOCK_NBYTES or claimed_blocks(memoryview(raw)) * BLOCK_NBYTES != len(raw):
        return None
    head = np.frombuffer(raw, HEAD, 1)[0].copy()
    raw[HEAD.itemsize - 8 : HEAD.itemsize] = bytes(8)
    if xxhash.xxh3_64_intdigest(raw) != head["digest"]:
        return None
    start, end = HEAD.itemsize, HEAD.itemsize + int(head["texts_nbytes"])
    counts = {ENTRY: int(head["entries"]), DELETED: int(head["deleted"]), DROPPED: int(head["dropped"])}
    if end + sum(count * dtype.itemsize for dtype, count in counts.items()) + _FOOT.itemsize > len(raw):
        return None
    texts = []
    while start < end:
        begin, start = start + 2, start + 2 + int.from_bytes(raw[start : start + 2], "little")
        texts.append(bytes(raw[begin:start]))
    if start != end or len(texts) != head["texts"]:
        return None
    parts = []
    for dtype, count in counts.items():
        parts.append(np.frombuffer(raw, dtype, count, start))
        start += count * dtype.itemsize
    kind, incarnation, sequence, number, next_block, segment_blocks = (int(head[name]) for name in Record._fields[:6])
    record = Record(kind, incarnation, sequence, number, next_block, segment_blocks, tuple(texts), *parts)
    return record if _is_consistent(record) else None


def _is_consistent(record: Record) -> bool:
    """Return whether all groups are indices into `texts`, and all chunks lie in the segment."""
    entries, groups = record.entries, len(record.texts)
    ends = entries["block"].astype(np.int64) + np.maximum(1, -(-entries["nbytes"].astype(np.int64) // BLOCK_NBYTES))
    inside = (entries["group"] < groups).all() and (ends <= record.segment_blocks).all()
    return bool(inside and (record.dropped["group"] < groups).all())


def batches(read: Read, *, segment_blocks: int, blocks_there: int) -> Iterator[Record]:
    """Yield the records of a segment's batches in order. `blocks_there`: present length of the file in blocks.

    Stops at a record that is damaged or comes from an earlier use of the file.
    """
    start, number, life = 0, 0, None
    while start < blocks_there:
        view = read(start * BLOCK_NBYTES, BLOCK_NBYTES)
        blocks = claimed_blocks(view)
        if not 0 < blocks <= blocks_there - start:
            return
        record = decode(view if blocks == 1 else read(start * BLOCK_NBYTES, blocks * BLOCK_NBYTES))
        if record is None or (record.kind, record.number, record.segment_blocks) != (BATCH, number, segment_blocks):
            return
        life = life or (record.incarnation, record.sequence)
        if life != (record.incarnation, record.sequence) or not start + blocks <= record.next_block <= segment_blocks:
            return
        yield record
        start, number = record.next_block, number + 1


def read_summary(read: Read, *, segment_blocks: int) -> Record | None:
    """Return the summary of a segment; None if it is missing or damaged."""
    tail = min(TAIL_BLOCKS, segment_blocks)
    view = read((segment_blocks - tail) * BLOCK_NBYTES, tail * BLOCK_NBYTES)
    if len(view) != tail * BLOCK_NBYTES:
        return None
    foot = np.frombuffer(view, _FOOT, 1, len(view) - _FOOT.itemsize)[0]
    blocks = int(foot["blocks"])
    if foot["magic"] != MAGIC or not 0 < blocks <= segment_blocks:
        return None
    if blocks > tail:
        view = read((segment_blocks - blocks) * BLOCK_NBYTES, blocks * BLOCK_NBYTES)
    record = decode(view[len(view) - blocks * BLOCK_NBYTES :])
    return record if record and (record.kind, record.segment_blocks) == (SUMMARY, segment_blocks) else None


def read_segment(read: Read, *, segment_blocks: int, blocks_there: int) -> tuple[Record, bool] | None:
    """Return all content of a segment as one SUMMARY, and whether the segment is sealed. None without any batch."""
    if blocks_there >= segment_blocks:
        sealed = read_summary(read, segment_blocks=segment_blocks)
        if sealed is not None:
            return sealed, True
    found = list(batches(read, segment_blocks=segment_blocks, blocks_there=blocks_there))
    return (joined(found), False) if found else None


def joined(records: Sequence[Record]) -> Record:
    indexes: dict[bytes, int] = {}
    entries, dropped = [], []
    for record in records:
        mapped = np.array([indexes.setdefault(text, len(indexes)) for text in record.texts], np.uint32)
        entries.append(record.entries.copy())
        dropped.append(record.dropped.copy())
        for part in (entries[-1], dropped[-1]):
            if len(part):
                part["group"] = mapped[part["group"]]
    last = records[-1]
    return last._replace(
        kind=SUMMARY,
        number=last.number + (last.kind == BATCH),
        texts=tuple(indexes),
        entries=np.concatenate(entries),
        deleted=np.concatenate([record.deleted for record in records]),
        dropped=np.concatenate(dropped),
    )


def living(record: Record) -> Array:
    """Return the entries that no later entry of the same key replaces and no later tombstone covers."""
    entries = record.entries
    if not len(entries):
        return entries
    keys = flat(entries["key"])
    # Find the last entry of each key. `unique` returns the first of equal keys, so the keys are reversed.
    _, first = np.unique(keys[::-1], return_index=True)
    latest = np.sort(len(entries) - 1 - first)
    alive = np.ones(len(latest), np.bool_)
    if len(record.deleted):
        # Batches are in order, so the dict holds the last tombstone of each key.
        deleted = dict(zip(raw_keys(record.deleted["key"]), record.deleted["batch"].tolist(), strict=True))
        deleted_in = np.array([deleted.get(key, 0) for key in keys[latest].tolist()], np.int64)
        alive &= entries["batch"][latest] >= deleted_in
    for group, batch in record.dropped.tolist():
        alive &= (entries["group"][latest] != group) | (entries["batch"][latest] >= batch)
    return entries[latest[alive]]


def tombstones_of(keys: Sequence[bytes], groups: Sequence[int]) -> tuple[Array, Array]:
    """Make `Record.deleted` and `Record.dropped`. `groups`: index of each dropped group in the record's texts."""
    deleted, dropped = np.zeros(len(keys), DELETED), np.zeros(len(groups), DROPPED)
    deleted["key"], dropped["group"] = key_array(keys), groups
    return deleted, dropped


def flat(keys: Array) -> Array:
    """Convert keys of shape [n, 2] to n values of 16 bytes, for sorting and hashing."""
    return np.ascontiguousarray(keys, "<u8").view("V16").reshape(-1)


def raw_keys(keys: KeyArray) -> list[bytes]:
    raw: list[bytes] = flat(keys).tolist()
    return raw


def key_array(keys: Sequence[bytes]) -> KeyArray:
    return from_bytes(b"".join(keys))
