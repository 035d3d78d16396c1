"""A directory that all nodes share: a parallel or network file system, or one disk of a single host.

Chunks are gathered into packs, large files in the format of `raykv.tier.segments.format`, each written by one node alone:

    <sequence>-<writer>-<process>.part    being filled; only its writer reads it
    <sequence>-<writer>-<process>.pack    sealed: it has its summary, and never changes again
    <sequence>-<writer>-<process>.gone    no pack: which keys and quota groups are gone from all packs begun before it

A pack is published by renaming it, after it was forced to the disk, so nobody ever sees half of one. Who starts later,
or elsewhere, or belongs to a cluster that never met this one, learns of a pack by its name, and of its chunks by its
summary. Nobody asks anybody: each node looks at the directory every now and then.

Room is made by removing packs, those first that were read longest ago (their time of modification tells; who reads from
a pack sets it). Every node sees the same order, so that several which find too much there remove the same ones. What is
told to be gone stays told for as long as there is anything older.

One thread looks at the directory, one writes, a few read. All of them may be held up by the file system for any time;
nobody else ever is.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
import xxhash

from raykv.config import FileTierConfig
from raykv.tier.base import Arrived, Chunk, Found, GroupNames, Tier, Written, is_same
from raykv.tier.file.catalog import Catalog, Pack
from raykv.tier.file.packs import VANISHED, Folder, Name, Part, gone_record
from raykv.tier.segments.format import BLOCK_NBYTES, blocks_of, flat, living
from raykv.tier.segments.index import key_array
from raykv.tier.segments.requests import Item, Request, raw_keys, results
from raykv.tier.segments.volume import IOV_MAX
from raykv.tier.ssd.drive import entries_of
from raykv.types import Bits, KeyArray, Rows

log = logging.getLogger(__name__)

WRITE_QUEUE_CHUNKS: Final = 1024
WRITE_QUEUE_NBYTES: Final = 256 << 20
"""Chunks that wait to be written; they are pinned in memory meanwhile."""
READ_QUEUE_CHUNKS: Final = 4096
"""Chunks that wait to be read."""
BATCH_CHUNKS: Final = 256
BATCH_NBYTES: Final = 32 << 20
RUN_NBYTES: Final = 8 << 20
"""Neighbours in a pack are read by one call, up to so much."""
STALE_S: Final = 24 * 3600.0
"""A part that was not written to for so long has lost its writer for good."""
TOUCH_S: Final = 60.0
"""A pack that is read from is marked as used this often, at most."""
RETRY_S: Final = 5.0
"""After an error the directory is left alone for so long."""
TELL_S: Final = 1.0
TELL_KEYS: Final = 1 << 14
"""What is gone is written down this often at most, and so many keys at once."""
MERGE_FILES: Final = 32
"""With more files of this node that tell what is gone, they are made one."""
CLOSE_S: Final = 5.0
"""`close` waits so long for operations under way."""


@dataclass(eq=False, slots=True)
class _Run:
    """Neighbours in a pack, to be read by one call. A list each of what belongs to a chunk."""

    pack: Pack
    block: int
    request: Request
    blocks: int = 0
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)


class FileTier(Tier):
    """See the module and `Tier`.

    A full or read-only file system turns it off, for writing: what is there is read all the same.
    """

    name = "file"

    def __init__(self, config: FileTierConfig, arena: memoryview, writer: str, groups: GroupNames) -> None:
        """Begin to look at the directory; what is there is found little by little.

        Args:
            arena: Writable bytes that begin at a page; offsets in chunks count from there.
            writer: Name of the node, part of its packs' names.

        Raises:
            ConfigError: There is no memory for the index.
        """
        self._config, self._arena, self._accounts = config, arena, groups
        self._folder = Folder(config.path, writer)
        self._blocks = config.pack_nbytes // BLOCK_NBYTES
        self._catalog = Catalog(writer, rows=config.rows, now_s=time.time())
        self._index, self._told = self._catalog.index, self._catalog.told
        self._sequence = 0
        self._tell_s = 0.0
        self._part: Part | None = None
        self._filling: Pack | None = None
        self._queue: deque[Item] = deque()
        self._queued_nbytes = 0
        self._flying: list[Item] = []
        self._runs: deque[_Run] = deque()
        self._reading = 0
        self._finished: deque[Request] = deque()
        self._lock = threading.Condition()
        self._evicting = threading.Lock()
        self._closed = self._readable = self._writable = self._slow = self._looked = False
        self._whole = False  # whether all packs that lay here at the last look are known
        self._reason, self._retry_s, self._look_s = "", 0.0, 0.0
        counts = ("written_nbytes", "disk_nbytes", "read_nbytes", "refused", "timeouts", "errors", "corrupt")
        self._counts = dict.fromkeys(counts, 0)
        self._removed = 0
        self._obsolete: set[Name] = set()
        work: list[Callable[[], None]] = [self._look_loop, self._write_loop, *[self._read_loop] * config.depth]
        self._threads = [threading.Thread(target=each, name=f"raykv-file{each.__name__}", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    # -- what is here -----------------------------------------------------------------------------------------------

    def has(self, keys: KeyArray) -> Bits:
        """See `Tier`. What the directory holds is not here while the directory is not."""
        with self._lock:
            if not self._readable:
                return np.zeros(len(keys), np.bool_)
            here: Bits = self._index.look(keys, now_s=time.time()) >= 0
        return here

    def find(self, keys: KeyArray) -> list[Found | None]:
        """See `Tier`. Quota groups that only other clusters have used so far get a number on this node here."""
        with self._lock:
            if not self._readable:
                return [None] * len(keys)
            rows = self._index.look(keys, now_s=time.time()).tolist()
            found = [self._index.found(row) if row >= 0 else None for row in rows]
            texts = {each.group: self._catalog.names.texts[each.group] for each in found if each is not None}
        numbers = {group: self._accounts.number(text) for group, text in texts.items()}
        told: list[Found | None] = []
        for each in found:
            number = None if each is None else numbers[each.group]
            told.append(None if each is None or number is None else each._replace(group=number))
        return told

    def keys(self) -> KeyArray:
        """Keys in packs that this node wrote: of the others every node knows as much."""
        with self._lock:
            mine: KeyArray = self._index.keys(self._catalog.own(self._index.ready()))
        return mine

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `Tier`; of packs that this node wrote, as `keys`."""
        with self._lock:
            return self._catalog.take_changes()

    def used_nbytes(self, group: int | None = None) -> int:
        """See `Tier`."""
        text = None if group is None else self._accounts.text(group)
        with self._lock:
            if text is None:
                return int(self._index.nbytes.sum())
            number = self._catalog.names.numbers.get(text)
            return 0 if number is None else int(self._index.nbytes[number])

    def stats(self) -> dict[str, Any]:
        """See `Tier`; also packs, pack_nbytes (what they take up) and packs_removed (by this node, for room)."""
        with self._lock:
            packs = [pack for pack in self._catalog.known.values() if pack.name.kind != "gone"]
            state = self._state()
            slow = f"an operation takes longer than {self._config.io_timeout_s} s" if state == "slow" else ""
            return {
                "state": state,
                "reason": slow or self._reason,
                "chunks": len(self._index),
                "used_nbytes": int(self._index.nbytes.sum()),
                "capacity_nbytes": self._config.capacity_nbytes,
                "packs": len(packs),
                "pack_nbytes": sum(pack.nbytes for pack in packs),
                "packs_removed": self._removed,
                "moved_nbytes": 0,
                **self._counts,
            }

    def _state(self) -> str:
        """Called with the lock."""
        if self._folder.longest_s() > self._config.io_timeout_s and not self._closed:
            if not self._slow:
                self._slow, self._counts["timeouts"] = True, self._counts["timeouts"] + 1
                log.warning("%s is slow", self._folder.path)
            return "slow"
        self._slow = False
        if self._readable and self._writable and not self._closed:
            return "on"
        return "off" if self._reason or self._closed else "starting"

    # -- down and up ------------------------------------------------------------------------------------------------

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """See `Tier`."""
        texts = {group: self._accounts.text(group) for group in {chunk.group for chunk in chunks}}
        taken: list[Chunk] = []
        request = results(0, lambda good: done(taken, good))
        with self._lock:
            usable = self._state() == "on"
            for chunk in chunks if usable else ():
                if len(self._queue) >= WRITE_QUEUE_CHUNKS or self._queued_nbytes >= WRITE_QUEUE_NBYTES:
                    break
                view = self._arena[chunk.offset : chunk.offset + blocks_of(chunk.nbytes) * BLOCK_NBYTES]
                item = Item(
                    key=chunk.key,
                    view=view,
                    nbytes=chunk.nbytes,
                    checksum=chunk.checksum,
                    group=chunk.group,
                    text=texts[chunk.group],
                    depth=chunk.depth,
                    parent=chunk.parent,
                    reads=min(chunk.reads, 0xFFFFFFFF),
                    expires_s=chunk.expires_s,
                    waiting=[(request, len(taken))],
                )
                self._queue.append(item)
                self._queued_nbytes += item.nbytes
                taken.append(chunk)
            self._counts["refused"] += len(chunks) - len(taken)
            request.results, request.left = [False] * len(taken), len(taken)
            self._lock.notify_all()
        return len(taken)

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """See `Tier`."""
        request = results(len(keys), done)
        with self._lock:
            full = self._reading > 0 and self._reading + len(keys) > READ_QUEUE_CHUNKS
            if self._closed or not self._readable or full or self._state() == "slow":
                self._counts["refused"] += len(keys)
                return False
            runs = self._runs_of(keys, found, offsets, request)
            request.left = sum(len(run.rows) for run in runs)
            self._reading += request.left
            self._runs.extend(runs)
            if not request.left:
                self._finished.append(request)
            self._lock.notify_all()
        return True

    def _runs_of(
        self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], request: Request
    ) -> list[_Run]:
        rows, columns = self._index.look(keys, now_s=time.time()), self._index.columns
        packs, blocks = self._index.segment[rows].tolist(), columns.page[rows].tolist()
        lengths, checksums = columns.nbytes[rows].tolist(), columns.checksum[rows].tolist()
        numbers = rows.tolist()
        runs: list[_Run] = []
        here = [
            place
            for place in np.flatnonzero(rows >= 0).tolist()
            if is_same(found[place], lengths[place], checksums[place])
        ]
        for place in sorted(here, key=lambda place: (packs[place], blocks[place])):
            run, size = runs[-1] if runs else None, blocks_of(lengths[place])
            adjoins = run is not None and (run.pack.number, run.block + run.blocks) == (packs[place], blocks[place])
            full = run is not None and ((run.blocks + size) * BLOCK_NBYTES > RUN_NBYTES or len(run.rows) == IOV_MAX)
            if run is None or not adjoins or full:
                run = _Run(self._catalog.packs[packs[place]], blocks[place], request)
                runs.append(run)
            run.blocks += size
            run.rows.append(numbers[place])
            run.places.append(place)
            run.offsets.append(offsets[place])
            run.lengths.append(lengths[place])
            run.checksums.append(checksums[place])
        return runs

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                while not (self._runs or self._finished or self._closed):
                    self._lock.wait()
                run = self._runs.popleft() if self._runs else None
            if run is not None:
                self._fetch(run)
                del run
            self._call_back()
            if self._closed:
                return

    def _fetch(self, run: _Run) -> None:
        """Read a run into the arena, and look whether all of it is right."""
        pack, problem, got = run.pack, None, 0
        pieces = [
            self._arena[offset : offset + blocks_of(nbytes) * BLOCK_NBYTES]
            for offset, nbytes in zip(run.offsets, run.lengths, strict=True)
        ]
        try:
            got = self._folder.read(pack.name, run.block * BLOCK_NBYTES, pieces)
        except OSError as error:
            problem = error
        good, start = list[bool](), 0
        for piece, nbytes, checksum in zip(pieces, run.lengths, run.checksums, strict=True):
            good.append(got >= start + nbytes and xxhash.xxh3_64_intdigest(piece[:nbytes]) == checksum)
            start += len(piece)
        with self._lock:
            self._reading -= len(run.rows)
            if problem is None or problem.errno not in VANISHED:
                wrong = [place for place, is_good in enumerate(good) if not is_good]
                self._counts["corrupt"] += len(wrong) if problem is None else 0
                self._catalog.remove(self._still(run, wrong))
            else:
                self._lose(pack)
            if problem is not None and problem.errno not in VANISHED:
                self._fail(_words(problem), reading=True)
            self._index.touch(self._still(run, np.flatnonzero(good).tolist()), now_s=time.time())
            self._counts["read_nbytes"] += sum(nbytes for nbytes, ok in zip(run.lengths, good, strict=True) if ok)
            self._settle_run(run, good)
        self._mark_used(pack)

    def _still(self, run: _Run, places: list[int]) -> Rows:
        """Rows of a run that still are what they were."""
        rows = np.array([run.rows[place] for place in places], np.int32)
        index, checksums = self._index, np.array([run.checksums[place] for place in places], np.uint64)
        same = (index.segment[rows] == run.pack.number) & (index.columns.checksum[rows] == checksums)
        return np.unique(rows[same]).astype(np.int32)

    def _settle_run(self, run: _Run, good: Sequence[bool]) -> None:
        request = run.request
        for place, is_good in zip(run.places, good, strict=True):
            request.results[place] = is_good
        request.left -= len(run.places)
        if not request.left:
            self._finished.append(request)

    def _mark_used(self, pack: Pack) -> None:
        now_s = time.monotonic()
        if pack.name.kind == "pack" and now_s - pack.touched_s > TOUCH_S:
            pack.touched_s = now_s
            try:
                self._folder.touch(pack.name)
            except OSError:
                pass  # it is gone, or we may only read

    # -- forgetting -------------------------------------------------------------------------------------------------

    def delete(self, keys: KeyArray) -> int:
        """See `Tier`. It holds for others, and across a restart, as soon as it is written down: within TELL_S."""
        names = set(raw_keys(keys))
        with self._lock:
            rows = self._index.look_all(keys)
            rows = np.unique(rows[rows >= 0]).astype(np.int32)
            coming = self._cancel(lambda item: item.key in names)
            here, sequence = {*raw_keys(self._index.keys(rows)), *coming}, self._gone_before(rows)
            self._told.add(sequence, keys=here if self._whole else names)
            if not self._whole:  # what lies in packs that are not known yet must not come when they are
                self._catalog.heed(sequence, list(names), [])
            self._catalog.remove(rows)
            self._lock.notify_all()
        return len(rows)

    def drop(self, group: int) -> int:
        """See `Tier`, and `delete`."""
        text = self._accounts.text(group)
        with self._lock:
            rows = self._catalog.rows_of_account(text)
            coming = self._cancel(lambda item: item.text == text)
            if len(rows) or coming or not self._whole:
                self._told.add(sequence := self._gone_before(rows), texts=[text])
                if not self._whole:
                    self._catalog.heed(sequence, [], [text])
            self._catalog.remove(rows)
            self._lock.notify_all()
        return len(rows)

    def _gone_before(self, rows: Rows) -> int:
        """A sequence after that of the packs which these lie in, or may come to lie in; by the time, as a rule."""
        packs = [int(each) for each in self._catalog.sequences(rows)]
        filling = [] if self._filling is None else [self._filling.name.sequence]
        return max(time.time_ns(), 1 + max(packs + filling, default=0))

    def _cancel(self, which: Callable[[Item], bool]) -> list[bytes]:
        """Of what is queued or being written, cancel some. Returns the keys."""
        found = [item for item in (*self._queue, *self._flying) if which(item)]
        for item in found:
            item.cancelled = True
        return [item.key for item in found]

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look_loop(self) -> None:
        while not self._closed:
            try:
                self._look()
                with self._lock:
                    self._look_s = time.monotonic() + self._config.scan_s
            except OSError as error:
                self._fail(_words(error), reading=True)
            except Exception:  # it must not end the thread: it is told of as any other trouble
                log.exception("bug while looking at %s", self._folder.path)
                self._fail("a bug; see the log", reading=True)
            self._call_back()
            with self._lock:
                self._lock.wait_for(lambda: self._closed, max(0.0, self._look_s - time.monotonic()))

    def _look(self) -> None:
        """Learn of what came, forget what went, and make room if there is too much."""
        folder, began_s = self._folder, time.monotonic()
        folder.prepare()
        names = folder.names()
        parts = [name for name in names if name.kind == "part" and name.token != folder.token]
        if not self._looked:
            mine = [name for name in parts if name.writer == folder.writer]
            for name in mine:
                self._take_over(name)
            names, self._looked = folder.names() if mine else names, True
        with self._lock:
            self._readable = not self._closed
            self._recovered()
            fresh = [name for name in names if name.kind != "part" and name.stem not in self._catalog.known]
        # What is gone first, then the newest packs: so nothing is entered in vain.
        whole = True
        for name in sorted(fresh, key=lambda name: (name.kind == "gone", name.sequence), reverse=True):
            if self._closed:
                return
            whole &= self._learn(name)
        with self._lock:
            self._whole = whole and self._readable
        self._miss({name.stem for name in names}, began_s)
        try:
            self._remove_stale(parts)
            self._remove_told(names)
            self._make_room()
        except OSError as error:  # it may be read all the same
            self._note_error("not tidied", error)

    def _take_over(self, name: Name) -> None:
        try:
            self._folder.take_over(name)
        except OSError as error:
            self._note_error(f"{name} stays as it is", error)

    def _learn(self, name: Name) -> bool:
        """Take in what a file says. False: it cannot be read, and is tried again at the next look."""
        try:
            record, nbytes = self._folder.record_of(name)
        except OSError as error:
            self._note_error(f"{name} cannot be read", error)
            return error.errno in VANISHED
        entries = None if record is None else living(record)
        with self._lock:
            pack = self._catalog.know(name, nbytes)
            if record is None or entries is None:
                return True
            texts = record.texts
            dropped = [texts[group] for group in record.dropped["group"].tolist() if group < len(texts)]
            self._catalog.heed(name.sequence, flat(record.gone["key"]).tolist(), dropped)
            self._catalog.enter(pack, texts, entries[entries["group"] < len(texts)])
        return True

    def _miss(self, there: set[str], began_s: float) -> None:
        """Forget what is not there any more. A listing may leave out what is renamed meanwhile."""
        with self._lock:
            known = list(self._catalog.known.values())
        lacking = [pack for pack in known if pack.name.stem not in there and pack.known_s < began_s]
        for pack in lacking:
            if self._folder.stat(pack.name) is None:
                with self._lock:
                    self._lose(pack)

    def _lose(self, pack: Pack) -> None:
        """A file is gone. Called with the lock."""
        self._catalog.lose(pack)
        if pack is self._filling and self._part is not None:
            self._part.broken = True

    def _remove_stale(self, parts: list[Name]) -> None:
        """Remove parts that nobody will ever seal."""
        for name in parts:
            there = self._folder.stat(name)
            if there is not None and time.time() - there.st_mtime > STALE_S:
                self._folder.remove(name)

    def _remove_told(self, names: list[Name]) -> None:
        """Remove what tells of nothing: files that are older than all that could hold what they speak against.

        Only at the second look: a listing may leave out what is renamed meanwhile.
        """
        oldest = min((name.sequence for name in names if name.kind != "gone"), default=time.time_ns())
        obsolete = {name for name in names if name.kind == "gone" and name.sequence < oldest}
        for name in obsolete & self._obsolete:
            self._folder.remove(name)
        self._obsolete = obsolete

    def _make_room(self) -> None:
        """Remove the packs that were used longest ago, until there is room for the one that this node fills."""
        own_part = ("part", self._folder.token)
        with self._evicting:
            names = [
                name for name in self._folder.names() if name.kind != "gone" and (name.kind, name.token) != own_part
            ]
            sizes = {name: self._size(name) for name in names}
            excess = sum(sizes.values()) + self._config.pack_nbytes - self._config.capacity_nbytes
            if excess <= 0:
                return
            stats = {name: self._folder.stat(name) for name in names if name.kind == "pack"}
            order = sorted((there.st_mtime_ns, name) for name, there in stats.items() if there is not None)
            excess -= sum(sizes[name] for name, there in stats.items() if there is None)
            for used_ns, name in order:
                there = self._folder.stat(name)
                if there is not None and there.st_mtime_ns != used_ns:
                    continue  # somebody reads from it just now
                if excess <= 0:
                    return
                if there is not None:
                    self._folder.remove(name)
                    self._removed += 1
                excess -= sizes[name]
                with self._lock:
                    pack = self._catalog.known.get(name.stem)
                    if pack is not None:
                        self._lose(pack)

    def _size(self, name: Name) -> int:
        """What a file takes up."""
        with self._lock:
            pack = self._catalog.known.get(name.stem)
        if pack is not None:
            return pack.nbytes
        there = self._folder.stat(name)
        return 0 if there is None else 512 * there.st_blocks

    # -- writing ----------------------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        while self._wait_for_work():
            try:
                self._write_step()
            except OSError as error:
                self._fail(_words(error))
            except Exception:  # it must not end the thread: it is told of as any other trouble
                log.exception("bug while writing to %s", self._folder.path)
                self._fail("a bug; see the log")
            self._call_back()
        try:
            self._seal()
            while self._told.pending and self._writable:
                self._tell()
        except OSError as error:
            log.warning("%s: not all is written that was to be: %s", self._folder.path, error)
            if self._part is not None:
                self._part.close()
        self._call_back()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to write; False when the tier is closed."""
        with self._lock:
            while not self._closed:
                now_s = time.monotonic()
                due_s = self._retry_s if not self._writable else self._due_s()
                if due_s <= now_s:
                    return True
                self._lock.wait(None if due_s == math.inf else due_s - now_s)
        return False

    def _due_s(self) -> float:
        """When the writer has something to do."""
        if self._queue:
            return 0.0
        tell_s = self._tell_s if self._told.pending else math.inf
        return min(tell_s, self._part.begun_s + self._config.seal_s if self._part else math.inf)

    def _write_step(self) -> None:
        now_s = time.monotonic()
        if not self._writable:
            self._folder.prepare()
            self._folder.probe(self._next_sequence())
            self._seal()  # what was being filled when it failed
            with self._lock:
                self._writable = True
                self._recovered()
            return
        if self._told.pending and now_s >= self._tell_s:
            self._tell()
        if self._part is not None and (self._part.broken or now_s >= self._part.begun_s + self._config.seal_s):
            self._seal()
        with self._lock:
            items = self._flying = self._gather()
        if items:
            self._write(items)
        elif self._queue:
            self._begin()

    def _gather(self) -> list[Item]:
        """Take from the queue what the next batch holds. Nothing, with a queue that is not empty: a new part is due."""
        part, items, blocks = self._part, dict[bytes, Item](), 0
        texts: set[bytes] = set()
        ahead = list(islice(self._queue, BATCH_CHUNKS))
        there = self._index.look(key_array([item.key for item in ahead]), now_s=time.time()) >= 0
        for item, here in zip(ahead, there.tolist(), strict=True):
            size = blocks_of(item.nbytes)
            if here or item.cancelled or size > self._blocks - 4:
                self._settle(self._pop(), here and not item.cancelled)
                continue
            if part is None or item.key in items or (items and (blocks + size) * BLOCK_NBYTES > BATCH_NBYTES):
                break
            if self._told.speaks_against(item.key, item.text, part.name.sequence):
                break
            if not part.fits(blocks=blocks + size, entries=len(items) + 1, texts=texts | {item.text}):
                break
            items[item.key] = self._pop()
            texts.add(item.text)
            blocks += size
        return list(items.values())

    def _pop(self) -> Item:
        item = self._queue.popleft()
        self._queued_nbytes -= item.nbytes
        return item

    def _settle(self, item: Item, good: bool) -> None:
        """A chunk is in a part now, or will not be."""
        for request, place in item.waiting:
            request.results[place] = good
            request.left -= 1
            if not request.left:
                self._finished.append(request)

    def _write(self, items: list[Item]) -> None:
        """Write a batch, and enter it: its writer reads it at once."""
        part, pack = self._part, self._filling
        assert part is not None
        assert pack is not None
        texts = tuple(dict.fromkeys(item.text for item in items))
        entries = entries_of(items, {text: place for place, text in enumerate(texts)})
        try:
            nbytes = part.write(entries, texts, [item.view for item in items])
        except OSError:
            with self._lock:
                self._flying = []
                for item in items:
                    self._settle(item, False)
            raise
        with self._lock:
            self._flying, pack.nbytes = [], part.nbytes
            self._counts["disk_nbytes"] += nbytes
            if self._catalog.known.get(pack.name.stem) is pack:
                self._catalog.enter(pack, texts, entries[np.array([not item.cancelled for item in items], np.bool_)])
            here = self._index.look_all(key_array([item.key for item in items])) >= 0
            for item, is_here in zip(items, here.tolist(), strict=True):
                self._counts["written_nbytes"] += item.nbytes if is_here else 0
                self._settle(item, is_here)

    def _next_sequence(self, above: int = 0) -> int:
        """The time, but above all that this process has used, and above another."""
        with self._lock:
            self._sequence = max(time.time_ns(), self._sequence + 1, above + 1)
            return self._sequence

    def _begin(self) -> None:
        """Begin a part. What was told to be gone before does not hold against it."""
        self._seal()
        if self._told.pending:
            self._tell()
        self._make_room()
        part = Part(self._folder, self._next_sequence(self._told.latest), nbytes=self._config.pack_nbytes)
        with self._lock:
            self._part, self._filling = part, self._catalog.know(part.name, 0)

    def _seal(self) -> None:
        """Publish what is being filled."""
        part, pack = self._part, self._filling
        if part is None or pack is None:
            return
        name = part.seal()
        with self._lock:
            self._part = self._filling = None
            self._counts["disk_nbytes"] += part.nbytes - pack.nbytes
            if name is None:
                self._lose(pack)
            else:
                pack.name, pack.nbytes = name, part.nbytes

    def _tell(self) -> None:
        """Write down what is gone; of older files of this node that say the like, make one with it."""
        with self._lock:
            told = self._told
            keys, texts = list(islice(told.pending_keys, TELL_KEYS)), list(told.pending_texts)
            old = [pack for pack in self._catalog.known.values() if pack.name.kind == "gone" and pack.mine]
            sequence = max([told.pending_sequence, *(pack.name.sequence + 1 for pack in old)])
            while self._folder.name(sequence, "gone").stem in self._catalog.known:
                sequence += 1
            self._catalog.heed(sequence, keys, texts)
            also = self._merged(old) if len(old) >= MERGE_FILES else None
        if also is None:
            old, also = [], ([], [])
        name = self._folder.name(sequence, "gone")
        record = gone_record(sequence, key_array([*keys, *also[0]]), [*texts, *also[1]])
        self._folder.tell(record, name)
        with self._lock:
            self._tell_s = time.monotonic() + TELL_S
            told.written(keys, texts)
            self._catalog.heed(sequence, *also)
            self._catalog.know(name, record.segment_blocks * BLOCK_NBYTES)
        for pack in old:
            self._folder.remove(pack.name)

    def _merged(self, old: list[Pack]) -> tuple[list[bytes], list[bytes]] | None:
        """What these files tell, but for what came again since; None if it is too much for one file."""
        keys, texts = self._told.of({pack.name.sequence for pack in old})
        here = self._index.look_all(key_array(keys)) >= 0
        keys = [key for key, is_here in zip(keys, here.tolist(), strict=True) if not is_here]
        texts = [text for text in texts if not len(self._catalog.rows_of_account(text))]
        return (keys, texts) if len(keys) + len(texts) <= TELL_KEYS else None

    # -- trouble ----------------------------------------------------------------------------------------------------

    def _fail(self, reason: str, *, reading: bool = False) -> None:
        """Turn off, for a while; what is queued is not done."""
        with self._lock:
            if reason != self._reason:
                log.warning("%s: the file tier is off: %s", self._folder.path, reason)
            self._counts["errors"] += 1
            self._reason, self._writable = reason, False
            self._retry_s = time.monotonic() + RETRY_S
            self._drop_writes()
            if reading:
                self._readable, self._whole, self._look_s = False, False, self._retry_s
                self._drop_reads()
            self._lock.notify_all()

    def _note_error(self, what: str, error: OSError) -> None:
        """Something failed that the rest does without."""
        if error.errno not in VANISHED:
            with self._lock:
                self._counts["errors"] += 1
            log.debug("%s: %s: %s", self._folder.path, what, error)

    def _recovered(self) -> None:
        if self._readable and self._writable and self._reason:
            log.warning("%s: the file tier is on again", self._folder.path)
            self._reason = ""

    def _drop_writes(self) -> None:
        """What is being written right now is not touched: its bytes are in use."""
        while self._queue:
            self._settle(self._pop(), False)

    def _drop_reads(self) -> None:
        while self._runs:
            run = self._runs.popleft()
            self._reading -= len(run.rows)
            self._settle_run(run, [False] * len(run.rows))

    def _call_back(self) -> None:
        """Tell whoever waits, without the lock."""
        while True:
            with self._lock:
                request = self._finished.popleft() if self._finished else None
            if request is None:
                return
            request.call()

    def close(self) -> None:
        """See `Tier`. What is being filled is sealed, if the file system does it within CLOSE_S."""
        with self._lock:
            self._closed, self._readable = True, False
            self._drop_writes()
            self._drop_reads()
            self._lock.notify_all()
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._call_back()
        if not any(thread.is_alive() for thread in self._threads):
            self._index.close()


def _words(error: OSError) -> str:
    return error.strerror or str(error)
