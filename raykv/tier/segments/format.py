"""The format of what tiers below memory keep in files: segments, and the batches of chunks in them. Pure.

A segment is a file of a fixed size, cut into blocks of BLOCK_NBYTES. It is filled from the front, batch by batch:

    [record][chunk][chunk] .. [record][chunk] ..                          .. [summary]

A batch is a record of whole blocks, which says what is in the batch and where the next one begins, and its chunks, each
from a block's beginning on. What is to be forgotten is in records too: keys that were deleted, and quota groups that were
dropped. It holds against all batches before its own, in this segment and in those of a lower sequence number.

A segment that gets no more batches is sealed by a summary: one record of all that its records say, which ends where the
file ends. Readers take the summary if it is whole, so a start reads one piece a segment. Otherwise they walk from batch
to batch, up to the first record that is not whole (`read_segment`).

All of a record, its padding included, is under one xxh3-64, and nothing in it is believed if that is wrong. It does
not cover the chunks: each entry has its chunk's checksum, to be compared whenever the chunk is read. A segment's
incarnation and sequence number together are unique, so what an earlier use of the file left behind is never taken for
a part of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.config import SLOT_ALIGNMENT_NBYTES

MAGIC: Final = 0x3147_4553_564B_5941  # "AYKVSEG1"
LAYOUT_VERSION: Final = 1
BLOCK_NBYTES: Final = SLOT_ALIGNMENT_NBYTES
"""The unit of direct input and output. Slots of the arena begin and end at its multiples too."""
TAIL_BLOCKS: Final = 32
"""A start reads so much of a segment's end at once: the summary of 1 700 chunks fits. A longer one takes two reads."""
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
        ("gone", "<u4"),
        ("dropped", "<u4"),
        ("reserved", "<u4", 3),
        ("digest", "<u8"),
    ]
)
"""The first bytes of a record. `number` counts the batches of a segment; `digest` is taken with itself as 0."""
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
"""A chunk. `block` counts from the segment's beginning; `group` is a place in the record's texts; `chained` is 1 if
`parent` is the key of the chunk before it."""
GONE: Final = np.dtype([("key", "<u8", 2), ("batch", "<u4"), ("reserved", "<u4")])
DROPPED: Final = np.dtype([("group", "<u4"), ("batch", "<u4")])
_FOOT: Final = np.dtype([("magic", "<u8"), ("blocks", "<u8")])
"""The last bytes of a summary: where it begins can be told from the file's end."""

Array = npt.NDArray[Any]
Read = Callable[[int, int], memoryview]
"""(offset, nbytes) to those bytes of a segment, or fewer where the file ends. They may change at the next call."""


class Record(NamedTuple):
    """What one record says; arrays of ENTRY, GONE and DROPPED.

    Attributes:
        kind: BATCH or SUMMARY.
        number: Of the batch; of a summary, how many batches there are.
        next_block: Where the next batch begins.
        texts: Quota groups as JSON. Entries name them by their place here.
    """

    kind: int
    incarnation: int
    sequence: int
    number: int
    next_block: int
    segment_blocks: int
    texts: tuple[bytes, ...]
    entries: Array
    gone: Array
    dropped: Array


def blocks_of(nbytes: int) -> int:
    """Blocks that so many bytes of a chunk take; at least one."""
    return max(1, -(-nbytes // BLOCK_NBYTES))


def record_blocks(*, entries: int, gone: int, dropped: int, texts_nbytes: int, texts: int) -> int:
    """Blocks of a record that holds so much."""
    nbytes = HEAD.itemsize + 2 * texts + texts_nbytes + _FOOT.itemsize
    nbytes += entries * ENTRY.itemsize + gone * GONE.itemsize + dropped * DROPPED.itemsize
    return blocks_of(nbytes)


def blocks_needed(record: Record) -> int:
    """Blocks that this record takes when it is written."""
    return record_blocks(
        entries=len(record.entries),
        gone=len(record.gone),
        dropped=len(record.dropped),
        texts=len(record.texts),
        texts_nbytes=sum(map(len, record.texts)),
    )


def encode(record: Record, target: memoryview) -> int:
    """Write a record to the front of `target`, which has room for it. Returns how many blocks it took."""
    blocks = blocks_needed(record)
    nbytes = blocks * BLOCK_NBYTES
    head = np.zeros((), HEAD)
    head["magic"], head["layout_version"], head["kind"], head["blocks"] = MAGIC, LAYOUT_VERSION, record.kind, blocks
    for field in ("incarnation", "sequence", "number", "next_block", "segment_blocks"):
        head[field] = getattr(record, field)
    texts = b"".join(len(text).to_bytes(2, "little") + text for text in record.texts)
    head["texts"], head["texts_nbytes"] = len(record.texts), len(texts)
    head["entries"], head["gone"], head["dropped"] = len(record.entries), len(record.gone), len(record.dropped)
    foot = np.array((MAGIC, blocks), _FOOT)
    body = head.tobytes() + texts + record.entries.tobytes() + record.gone.tobytes() + record.dropped.tobytes()
    target[: len(body)] = body
    target[len(body) : nbytes] = bytes(nbytes - len(body) - _FOOT.itemsize) + foot.tobytes()
    head["digest"] = xxhash.xxh3_64_intdigest(target[:nbytes])
    target[: HEAD.itemsize] = head.tobytes()
    return blocks


def claimed_blocks(first: memoryview) -> int:
    """How long the record claims to be whose first block this is; 0 if it is none. Not to be believed yet."""
    if len(first) < BLOCK_NBYTES:
        return 0
    head = np.frombuffer(first, HEAD, 1)[0]
    return int(head["blocks"]) if head["magic"] == MAGIC and head["layout_version"] == LAYOUT_VERSION else 0


def decode(view: memoryview) -> Record | None:
    """Read a record that takes all of `view`; None if a bit of it is wrong. What it says stays when `view` changes."""
    raw = bytearray(view)
    if len(raw) < BLOCK_NBYTES or claimed_blocks(memoryview(raw)) * BLOCK_NBYTES != len(raw):
        return None
    head = np.frombuffer(raw, HEAD, 1)[0].copy()
    raw[HEAD.itemsize - 8 : HEAD.itemsize] = bytes(8)
    if xxhash.xxh3_64_intdigest(raw) != head["digest"]:
        return None
    texts, start = [], HEAD.itemsize
    for _ in range(int(head["texts"])):
        size = int.from_bytes(raw[start : start + 2], "little")
        texts.append(bytes(raw[start + 2 : start + 2 + size]))
        start += 2 + size
    parts = []
    for kind, count in ((ENTRY, head["entries"]), (GONE, head["gone"]), (DROPPED, head["dropped"])):
        parts.append(np.frombuffer(raw, kind, int(count), start))
        start += int(count) * kind.itemsize
    return Record(
        kind=int(head["kind"]),
        incarnation=int(head["incarnation"]),
        sequence=int(head["sequence"]),
        number=int(head["number"]),
        next_block=int(head["next_block"]),
        segment_blocks=int(head["segment_blocks"]),
        texts=tuple(texts),
        entries=parts[0],
        gone=parts[1],
        dropped=parts[2],
    )


def batches(read: Read, *, segment_blocks: int, blocks_there: int) -> Iterator[Record]:
    """The batches of a segment, from the first up to what is not whole, or was left by an earlier use of the file.

    Args:
        segment_blocks: Size that the segment has when it is whole.
        blocks_there: Blocks that the file has.
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
    """The summary of a sealed segment; None where there is none that is whole."""
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
    """All that a segment's records say, as one of kind SUMMARY; and whether it is sealed. None: it has no batch."""
    if blocks_there >= segment_blocks:
        sealed = read_summary(read, segment_blocks=segment_blocks)
        if sealed is not None:
            return sealed, True
    found = list(batches(read, segment_blocks=segment_blocks, blocks_there=blocks_there))
    return (joined(found), False) if found else None


def joined(records: Sequence[Record]) -> Record:
    """One record, of kind SUMMARY, of all that the batches of one segment say."""
    places: dict[bytes, int] = {}
    entries, dropped = [], []
    for record in records:
        mapped = np.array([places.setdefault(text, len(places)) for text in record.texts], np.uint32)
        entries.append(record.entries.copy())
        dropped.append(record.dropped.copy())
        if len(entries[-1]):
            entries[-1]["group"] = mapped[entries[-1]["group"]]
        if len(dropped[-1]):
            dropped[-1]["group"] = mapped[dropped[-1]["group"]]
    last, gone = records[-1], [record.gone for record in records]
    return last._replace(
        kind=SUMMARY,
        number=last.number + (last.kind == BATCH),
        texts=tuple(places),
        entries=np.concatenate(entries),
        gone=np.concatenate(gone),
        dropped=np.concatenate(dropped),
    )


def living(record: Record) -> Array:
    """Entries of a segment that nothing in it speaks against: neither a later entry of the key, nor that it is gone."""
    entries = record.entries
    if not len(entries):
        return entries
    keys = flat(entries["key"])
    # The last entry of each key: `unique` names the first one of those in front of it.
    _, first = np.unique(keys[::-1], return_index=True)
    kept = np.sort(len(entries) - 1 - first)
    alive = np.ones(len(kept), np.bool_)
    if len(record.gone):
        latest: dict[bytes, int] = {}
        for key, batch in zip(flat(record.gone["key"]).tolist(), record.gone["batch"].tolist(), strict=True):
            latest[key] = max(batch, latest.get(key, 0))
        gone_in = np.array([latest.get(key, 0) for key in keys[kept].tolist()], np.int64)
        alive &= entries["batch"][kept] >= gone_in
    for group, batch in record.dropped.tolist():
        alive &= (entries["group"][kept] != group) | (entries["batch"][kept] >= batch)
    survivors: Array = entries[kept[alive]]
    return survivors


def flat(keys: Array) -> Array:
    """Keys of shape [n, 2] as n values of 16 bytes, which compare, sort and hash whole."""
    return np.ascontiguousarray(keys, "<u8").view("V16").reshape(-1)
