"""Targets: files that another process, an earlier version or a failing disk may have written."""

import atexit
import gzip
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from raykv.config import FileTierConfig, SsdConfig
from raykv.errors import LostError, RayKVError, UsageError
from raykv.memory.arena import SharedMemory
from raykv.memory.layout import Layout
from raykv.memory.reader import ShmReader
from raykv.memory.recovery import require_sound
from raykv.memory.table import Table
from raykv.planner.trace import read_trace
from raykv.storage.store import Store
from raykv.tier.file.folder import Folder
from raykv.tier.file.scanning import Scanner
from raykv.tier.file.state import State
from raykv.tier.segments import format as segments_format
from raykv.tier.segments.format import BLOCK_NBYTES, ENTRY, HEAD, Record
from raykv.tier.segments.volume import Volume
from raykv.tier.ssd.recovery import Recovery
from raykv.tier.ssd.state import Drive, Shared
from tests.fuzz.base import TARGETS, fuzzed
from tests.support import stores
from tests.support.hostile import Source
from tests.support.stores import Bench, names_to_keys
from tests.support.tiers import environment_of

PAGE = 4096
SEGMENT_BLOCKS = 16
FIELDS = {"arena_nbytes": "128 KiB", "extent_nbytes": "64 KiB", "max_chunks": 64}
NOW_S = 100.0
LETTERS = "abcdefghijklm"


@cache
def folder_for(name: str) -> Path:
    """A directory of this process. It is removed at the end of the process."""
    path = Path(tempfile.mkdtemp(prefix=f"raykv-fuzz-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# -- the chunk table --------------------------------------------------------------------------------------------------


@cache
def image() -> tuple[dict[int, bytes], int, bytes]:
    """Return a table in use: its pages that are not zero by offset, its length, and the arena."""
    bench = Bench.open(None, now_s=NOW_S, **FIELDS)
    bench.put("abcdef")
    bench.put("gh", parent="f", hints={"ttl_s": 50.0})
    bench.pin("ac")
    bench.delete("ad")
    bench.lend(2)
    bench.store.quarantine(bench.lend(1).rows, now_s=bench.now_s)
    table, arena = (bytes(memory.view) for memory in (bench.store.table.memory, bench.store.arena))
    bench.store.close()
    pages = {at: table[at : at + PAGE] for at in range(0, len(table), PAGE)}
    return {at: page for at, page in pages.items() if any(page)}, len(table), arena


def places() -> list[tuple[int, int]]:
    """Return (offset, nbytes) of the parts of a table that hold data."""
    layout = Layout(64, 2)
    parts = [(layout.header, 96), (layout.namespaces, 64), (layout.extent_slots, 8)]
    parts += [(start, 512) for start in layout.indexes]
    return parts + layout.parts_of_rows(0, 12)


def scribbled(table: memoryview, source: Source) -> None:
    """Overwrite parts of a table. `source` chooses where, and what."""
    parts = places()
    while source:
        start, nbytes = source.pick(parts)
        width = source.pick([1, 2, 4, 8])
        at = start + source.below(nbytes) // width * width
        table[at : at + width] = source.raw(width).ljust(width, b"\0")


def scribbles() -> list[bytes]:
    count = len(places())
    every = [struct.pack("<BBBQ", part, 3, at, value) for part in range(count) for at in (0, 8) for value in (0, 1)]
    return [b"", *every, b"".join(every[:9])]


@contextmanager
def mapped(data: bytes) -> Iterator[tuple[SharedMemory, SharedMemory]]:
    pages, nbytes, content = image()
    memory, arena = SharedMemory.create(None, nbytes), SharedMemory.create(None, len(content))
    for at, page in pages.items():
        memory.view[at : at + PAGE] = page
    arena.view[:] = content
    scribbled(memory.view, Source(data))
    yield memory, arena


@fuzzed(scribbles, LostError)
def table(data: bytes) -> None:
    """The table of an earlier process. It is refused, or recovered so that the store can work with it."""
    with mapped(data) as (memory, arena):
        config, found = stores.config_for(None, **FIELDS), Table(memory)
        if (found.rows, found.extents, found.extent_nbytes) != (config.rows, config.extents, config.extent_nbytes):
            return  # `attach_files` refuses it
        store = Store(config, found, arena, now_s=NOW_S + 20.0)
        require_sound(store.table)
        ready = store.table.ready_rows()
        if np.array_equal(store.table.find(store.table.keys_of(ready)), ready):
            stores.check(store)  # otherwise keys have changed, which only the index shows: their chunks are not found
        bench = Bench(store, NOW_S + 20.0)
        bench.store.unpin(bench.pin(LETTERS))
        bench.put("ijk", parent="h")
        bench.delete("ab")
        bench.verify(LETTERS)
        bench.put("lm")
        require_sound(store.table)


@fuzzed(scribbles, LostError)
def table_in_use(data: bytes) -> None:
    """A table that is damaged while a reader on its host uses it. Reads are hits or misses, never errors."""
    with mapped(b"") as (memory, arena):
        reader = ShmReader(str(memory.path), str(arena.path), writable=False)
        scribbled(memory.view, Source(data))
        keys, now_s = names_to_keys(LETTERS), NOW_S + 20.0
        into = [bytearray(PAGE) for _ in LETTERS]
        hits, nbytes = reader.read(keys, into, verify=True, now_s=now_s)
        assert nbytes <= PAGE * len(keys) or not hits.all()
        assert len(reader.lengths(keys, now_s=now_s)) == len(reader.ready(keys, now_s=now_s)) == len(keys)
        for key in keys:
            reader.ready_one(key.tobytes())
            reader.read_one(key.tobytes(), into[0])
        reader.close()


# -- segments and packs -----------------------------------------------------------------------------------------------


def entries_of(blocks: list[int], group: int = 0) -> segments_format.Array:
    entries = np.zeros(len(blocks), ENTRY)
    entries["key"] = np.arange(2 * len(blocks)).reshape(-1, 2) + 7
    entries["block"], entries["nbytes"], entries["group"] = blocks, 5000, group
    entries["checksum"] = xxhash.xxh3_64_intdigest(bytes(5000))
    return entries


def segments() -> list[bytes]:
    """Files of 16 blocks: batches without and with a summary, with tombstones, and a file of tombstones alone."""
    deleted, dropped = segments_format.tombstones_of([b"k" * 16], [1])
    texts = (b'{"model":"m0"}', b'{"model":"m1"}')
    fields = (7, 3, 0, 5, SEGMENT_BLOCKS, texts)
    batch = Record(segments_format.BATCH, *fields, entries_of([1, 3]), deleted[:0], dropped[:0])
    second = batch._replace(number=1, next_block=8, entries=entries_of([6], 1), deleted=deleted, dropped=dropped)
    unsealed, sealed = bytearray(SEGMENT_BLOCKS * BLOCK_NBYTES), bytearray(SEGMENT_BLOCKS * BLOCK_NBYTES)
    for raw in (unsealed, sealed):
        segments_format.encode(batch, memoryview(raw))
        segments_format.encode(second, memoryview(raw)[5 * BLOCK_NBYTES :])
    summary = segments_format.joined([batch, second])
    segments_format.encode(summary, memoryview(sealed)[-summary.blocks() * BLOCK_NBYTES :])
    alone = second._replace(kind=segments_format.SUMMARY, entries=entries_of([]), segment_blocks=1, next_block=0)
    tombs = bytearray(BLOCK_NBYTES)
    segments_format.encode(alone, memoryview(tombs))
    return [bytes(unsealed[: 8 * BLOCK_NBYTES]), bytes(sealed), bytes(tombs)]


def with_right_checksums(data: bytes) -> bytes:
    """Set the checksum of every record: otherwise nothing behind the checksum would be tested."""
    raw = bytearray(data[: SEGMENT_BLOCKS * BLOCK_NBYTES])
    for at in range(0, len(raw) - BLOCK_NBYTES + 1, BLOCK_NBYTES):
        view = memoryview(raw)[at:]
        nbytes = segments_format.claimed_blocks(view[:BLOCK_NBYTES]) * BLOCK_NBYTES
        if 0 < nbytes <= len(view):
            view[HEAD.itemsize - 8 : HEAD.itemsize] = bytes(8)
            view[HEAD.itemsize - 8 : HEAD.itemsize] = xxhash.xxh3_64_intdigest(view[:nbytes]).to_bytes(8, "little")
    return bytes(raw)


@fuzzed(segments)
def segment(data: bytes) -> None:
    """A segment's records. Damage is left out, never an error."""
    raw = memoryview(with_right_checksums(data))
    for blocks in (SEGMENT_BLOCKS, len(raw) // BLOCK_NBYTES):
        if not blocks:
            continue
        found = segments_format.read_segment(
            lambda offset, nbytes: raw[offset : offset + nbytes],
            segment_blocks=blocks,
            blocks_there=len(raw) // BLOCK_NBYTES,
        )
        if found is None:
            continue
        record, _ = found
        alive = segments_format.living(record)
        assert len(alive) <= len(record.entries)
        assert set(record.dropped_texts()) <= set(record.texts)
        assert (alive["group"] < len(record.texts)).all()
        assert (alive["block"] + segments_format.blocks_of(1) <= blocks).all()
        target = bytearray(record.blocks() * BLOCK_NBYTES)
        segments_format.encode(record, memoryview(target))
        again = segments_format.decode(memoryview(target))
        assert again is not None
        assert again.texts == record.texts


@fuzzed(segments)
def pack(data: bytes) -> None:
    """A file in the directory of the file tier, as the tier's scanner meets it. The tier goes on."""
    root = folder_for("packs")
    arena = memoryview(bytearray(1 << 16))
    config = FileTierConfig.load({"path": root, "capacity_nbytes": 64 << 20, "pack_nbytes": 1 << 20, "max_chunks": 64})
    state = State(config, environment_of(arena, "a"))
    try:
        scanner, folder = Scanner(state), Folder(root, "other")
        folder.prepare()
        names = [folder.name(5, "pack"), folder.name(6, "tombs"), folder.name(4, "pack")]
        for name, content in zip(names, (data, data, segments()[1]), strict=True):
            (folder.path / str(name)).write_bytes(with_right_checksums(content))
        scanner.scan()
        assert state.readable
        assert not state.counts["errors"]
        catalog = state.catalog
        rows = catalog.index.ready()
        for row in rows.tolist():
            place, found = catalog.packs[int(catalog.index.segment[row])], catalog.index.found(row)
            into = memoryview(bytearray(min(found.nbytes, 1 << 16)))
            folder.read(place.name, int(catalog.index.columns.page[row]) * BLOCK_NBYTES, [into])
        catalog.take_changes()
        for known in list(catalog.known.values()):
            catalog.remove_pack(known)
        assert not len(catalog.index)
        assert not catalog.index.nbytes.any()
    finally:
        state.catalog.index.close()
        state.callbacks.close([], 5.0)
        for path in (root / "raykv").iterdir():
            path.unlink()


@fuzzed(segments)
def drive(data: bytes) -> None:
    """A segment file on a drive, as recovery of the SSD tier meets it. The drive is on afterwards."""
    root = folder_for("drive")
    arena = memoryview(bytearray(1 << 16))
    nbytes = SEGMENT_BLOCKS * BLOCK_NBYTES
    config = SsdConfig.load(
        {"paths": [root], "capacity_nbytes": 8 * nbytes, "segment_nbytes": nbytes, "max_chunks": 64, "direct": "never"}
    )
    shared = Shared(config, environment_of(arena))
    volume = Volume(root, segment_nbytes=nbytes, direct="never")
    made = Drive(0, volume, config, shared.lock)
    shared.drives.append(made)
    try:
        volume.open()
        for number, content in ((0, data), (1, segments()[1])):
            (root / f"{number:06}.segment").write_bytes(with_right_checksums(content))
        Recovery(shared, made).list_segments()
        while made.tasks:
            made.tasks.popleft()()
        assert made.state == "on"
        assert not made.reason
        assert len(shared.index) == len(shared.index.ready())
    finally:
        volume.close()
        shared.index.close()
        shared.callbacks.close([], 5.0)
        for path in root.glob("*.segment"):
            path.unlink()


def trace_files() -> list[bytes]:
    plain = TARGETS["trace"].seeds()
    return [*plain, *(gzip.compress(each, mtime=0) for each in plain)]


@fuzzed(trace_files, UsageError)
def trace_file(data: bytes) -> None:
    """A file with a trace for the planner, plain or gzipped."""
    path = folder_for("trace") / "trace"
    path.write_bytes(data)
    assert read_trace(path).chunks > 0


def file_names() -> list[bytes]:
    return [b"0000000000000000005-node-0011aabb.pack", b"9999999999999999999-a-00000000.tombs", b"raykv", b"x.part"]


@fuzzed(file_names, RayKVError, OSError, ValueError)
def file_name(data: bytes) -> None:
    """The name of a file in the directory of the file tier. OSError and ValueError are from making the file."""
    root = folder_for("names")
    folder = Folder(root, "a")
    folder.prepare()
    path = folder.path / data.decode("latin-1").replace("/", "_").replace("\0", "_")[:120]
    path.touch()
    try:
        for name in folder.names():
            assert str(name) == path.name
            assert folder.stat(name) is not None
            assert name.sequence < 1 << 64
    finally:
        path.unlink()
