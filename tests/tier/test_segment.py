"""The format of segments: records are read as they were written. Damaged and stale records are rejected."""

import random

import numpy as np
import pytest
import xxhash

from raykv.tier.segments.format import (
    BATCH,
    BLOCK_NBYTES,
    DELETED,
    DROPPED,
    ENTRY,
    HEAD,
    SUMMARY,
    Record,
    batches,
    blocks_of,
    decode,
    encode,
    joined,
    living,
    read_segment,
    read_summary,
)

BLOCKS = 256


def entries_of(*keys: int, group: int = 0, batch: int = 0) -> np.ndarray:
    entries = np.zeros(len(keys), ENTRY)
    entries["key"] = np.array([(key, key + 1) for key in keys], np.uint64).reshape(-1, 2)
    entries["nbytes"], entries["group"], entries["batch"] = 5000, group, batch
    return entries


def deleted_of(*keys: int, batch: int = 0) -> np.ndarray:
    deleted = np.zeros(len(keys), DELETED)
    deleted["key"] = np.array([(key, key + 1) for key in keys], np.uint64).reshape(-1, 2)
    deleted["batch"] = batch
    return deleted


def dropped_of(*groups: int, batch: int = 0) -> np.ndarray:
    return np.array([(group, batch) for group in groups], DROPPED)


def record_of(entries=None, deleted=None, dropped=None, **fields) -> Record:
    given = {
        "kind": BATCH,
        "incarnation": 7,
        "sequence": 3,
        "number": 0,
        "next_block": 10,
        "segment_blocks": BLOCKS,
        "texts": (b"one", b"another"),
        "entries": entries_of(1, 2, 3) if entries is None else entries,
        "deleted": deleted_of() if deleted is None else deleted,
        "dropped": dropped_of() if dropped is None else dropped,
    }
    return Record(**{**given, **fields})


def equal(one: Record, other: Record) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def written(record: Record) -> bytearray:
    target = bytearray(record.blocks() * BLOCK_NBYTES)
    assert encode(record, memoryview(target)) == len(target)
    return target


class File:
    """A segment in memory."""

    def __init__(self) -> None:
        self.raw = bytearray(BLOCKS * BLOCK_NBYTES)
        self.end, self.records = 0, list[Record]()

    def add(self, chunk_blocks: int = 3, **fields) -> Record:
        number = len(self.records)
        record = record_of(**{"number": number, **fields})
        record = record._replace(next_block=self.end + record.blocks() + chunk_blocks)
        for part in (record.entries, record.deleted, record.dropped):
            part["batch"] = number
        self.put(self.end, record)
        self.end = record.next_block
        self.records.append(record)
        return record

    def put(self, block: int, record: Record) -> None:
        raw = written(record)
        self.raw[block * BLOCK_NBYTES : block * BLOCK_NBYTES + len(raw)] = raw

    def seal(self) -> Record:
        summary = joined(self.records)
        self.put(BLOCKS - summary.blocks(), summary)
        return summary

    def read(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.raw)[offset : offset + nbytes]

    def batches(self, blocks_there: int = BLOCKS) -> list[Record]:
        return list(batches(self.read, segment_blocks=BLOCKS, blocks_there=blocks_there))


@pytest.mark.parametrize("count", [0, 1, 50, 3000])
def test_a_record_is_read_as_it_was_written(count: int):
    record = record_of(entries_of(*range(count)), deleted_of(*range(count)), dropped_of(1))
    raw = written(record)
    found = decode(memoryview(raw))
    assert found is not None
    assert equal(found, record)
    raw[:] = bytes(len(raw))
    assert equal(found, record), "it stays when the bytes change"


def test_no_flipped_bit_is_believed(rng: random.Random):
    raw = written(record_of(deleted=deleted_of(4, 5), dropped=dropped_of(0)))
    for bit in [*range(1100), *(rng.randrange(8 * len(raw)) for _ in range(1000))]:
        raw[bit // 8] ^= 1 << bit % 8
        assert decode(memoryview(raw)) is None
        raw[bit // 8] ^= 1 << bit % 8
    assert decode(memoryview(raw)) is not None


def test_garbage_is_nothing(rng: random.Random):
    for _ in range(200):
        raw = bytearray(rng.randbytes(BLOCK_NBYTES * rng.randrange(1, 4)))
        assert decode(memoryview(raw)) is None
        raw[:8] = written(record_of())[:8]
        assert decode(memoryview(raw)) is None
    assert decode(memoryview(b"")) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("texts", 3), ("texts", (1 << 32) - 1), ("texts_nbytes", 0), ("texts_nbytes", (1 << 32) - 1),
     ("entries", 90), ("entries", (1 << 32) - 1), ("deleted", (1 << 32) - 1), ("dropped", (1 << 32) - 1)],
)  # fmt: skip
def test_counts_that_do_not_fit_a_record_are_not_believed(field: str, value: int):
    """The checksum is no proof: xxh3 is not cryptographic, and the writer may be gone wrong."""
    raw = written(record_of())
    head = np.frombuffer(raw, HEAD, 1).copy()
    head[field], head["digest"] = value, 0
    raw[: HEAD.itemsize] = head.tobytes()
    head["digest"] = xxhash.xxh3_64_intdigest(raw)
    raw[: HEAD.itemsize] = head.tobytes()
    assert decode(memoryview(raw)) is None


def test_content_that_points_outside_is_not_believed():
    for field, value in (("group", 2), ("block", BLOCKS - 1), ("block", (1 << 32) - 1), ("nbytes", (1 << 32) - 1)):
        entries = entries_of(1, 2)
        entries[field][1] = value
        assert decode(memoryview(written(record_of(entries)))) is None, field
    assert decode(memoryview(written(record_of(dropped=dropped_of(2))))) is None
    entries = entries_of(1)
    entries["block"] = BLOCKS - 2
    assert decode(memoryview(written(record_of(entries)))) is not None


def test_chunks_take_whole_blocks():
    assert [blocks_of(nbytes) for nbytes in (0, 1, 4095, 4096, 4097)] == [1, 1, 1, 1, 2]


def test_a_walk_ends_where_something_is_not_whole():
    file = File()
    for number in range(5):
        file.add(entries=entries_of(number), chunk_blocks=number)
    assert len(file.batches()) == 5
    assert len(file.batches(blocks_there=file.records[2].next_block)) == 3
    file.raw[file.records[2].next_block * BLOCK_NBYTES + 50] ^= 1
    assert [int(record.entries["key"][0, 0]) for record in file.batches()] == [0, 1, 2]
    file.raw[50] ^= 1
    assert file.batches() == []


@pytest.mark.parametrize("field", ["incarnation", "sequence", "segment_blocks", "number"])
def test_what_an_earlier_use_left_behind_is_not_believed(field: str):
    file = File()
    file.add()
    file.add(**{field: 99})
    assert len(file.batches()) == 1


def test_a_summary_says_what_the_batches_say():
    file = File()
    file.add(entries=entries_of(1, 2), texts=(b"one",))
    file.add(entries=entries_of(3, group=1), texts=(b"other", b"one"), deleted=deleted_of(1), dropped=dropped_of(0))
    walked, sealed = read_segment(file.read, segment_blocks=BLOCKS, blocks_there=BLOCKS)
    assert not sealed
    summary = file.seal()
    found, sealed = read_segment(file.read, segment_blocks=BLOCKS, blocks_there=BLOCKS)
    assert sealed
    assert equal(found, summary)
    assert equal(found, walked)
    assert found.kind == SUMMARY
    assert found.number == 2
    assert [found.texts[place] for place in found.entries["group"].tolist()] == [b"one", b"one", b"one"]
    assert [found.texts[place] for place in found.dropped["group"].tolist()] == [b"other"]


def test_a_long_summary_is_found():
    file = File()
    for number in range(4):
        file.add(entries=entries_of(*range(1000 * number, 1000 * number + 500)))
    file.seal()
    found = read_summary(file.read, segment_blocks=BLOCKS)
    assert found is not None
    assert len(found.entries) == 2000
    file.raw[-1] ^= 1
    assert read_summary(file.read, segment_blocks=BLOCKS) is None
    found, sealed = read_segment(file.read, segment_blocks=BLOCKS, blocks_there=BLOCKS)
    assert len(found.entries) == 2000
    assert not sealed


def test_an_empty_file_has_nothing():
    assert read_segment(File().read, segment_blocks=BLOCKS, blocks_there=BLOCKS) is None
    assert read_segment(lambda *_: memoryview(b""), segment_blocks=BLOCKS, blocks_there=0) is None


def test_the_latest_word_on_a_key_counts():
    file = File()
    file.add(entries=entries_of(1, 2, 3, 4))
    file.add(entries=entries_of(2, 5), deleted=deleted_of(1, 2))
    file.add(entries=entries_of(6, group=1), dropped=dropped_of(1))
    file.add(entries=entries_of(7), deleted=deleted_of(3, 3))
    file.add(entries=entries_of(3))
    alive = living(joined(file.records))
    assert alive["key"][:, 0].tolist() == [4, 2, 5, 6, 7, 3]
    assert alive["batch"].tolist() == [0, 1, 1, 2, 3, 4]
    file.add(entries=entries_of(8, group=1), dropped=dropped_of(0, 1))
    assert living(joined(file.records))["key"][:, 0].tolist() == [8]
