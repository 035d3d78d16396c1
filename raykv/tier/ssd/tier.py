"""The tier of a node's SSDs: a log of segments on each path, one index in memory for all of them.

Bytes go straight between the arena and the drives (`raykv.tier.segments.volume`), in batches of a record and many chunks
(`raykv.tier.segments.format`). Each path has its log (`raykv.tier.segments.log`) and its threads, which take the next work from the
queues as they become free (`raykv.tier.ssd.drive`), so a path that is slower gets less.

A start reads one piece of each segment, on the paths' threads. What waits in a queue when the process is killed is not
there afterwards, and nobody was told that it is.

A path that fails, or takes too long, is off or slow: it gets nothing new, what waits for it is called back as not done,
and the others go on. What is under way on it is called back when the disk lets go of it, since until then it may still
be writing to those bytes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from raykv.tier.base import Arrived, Chunk, Found, GroupNames, Tier, Written, is_same
from raykv.tier.segments.format import BLOCK_NBYTES, blocks_of
from raykv.tier.segments.index import SEGMENTS, Index, key_array
from raykv.tier.segments.requests import Common, Item, Request, raw_keys, results
from raykv.tier.segments.volume import Volume
from raykv.tier.ssd.drive import QUEUED_READS, Drive, Piece
from raykv.types import Bits, KeyArray

log = logging.getLogger(__name__)

QUEUED_CHUNKS: Final = 1 << 14
QUEUED_NBYTES: Final = 128 << 20
"""What may wait to be written, beside what is being written: so much of the arena cannot be evicted meanwhile."""
ROW_NBYTES_OF_SSD: Final = 64 << 10
"""The index has a row for each so many bytes, if the config does not say otherwise."""
WATCH_S: Final = 0.25
"""How often it is looked whether an operation takes too long, or a path may be tried again."""
TIDY_S: Final = 10.0
"""How often expired chunks are taken out of the index, and directories are looked at."""
CLOSE_S: Final = 10.0
"""`close` waits so long for operations under way."""


class SsdTier(Tier):
    """See the module and `Tier`."""

    name = "ssd"

    def __init__(
        self,
        config: SsdConfig,
        arena: memoryview,
        directory: str,
        groups: GroupNames,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take the directories, and begin to look through them on threads.

        Args:
            arena: Writable bytes that begin at a page; offsets in chunks count from there.
            directory: Name of the directory in each path that the files lie in; a node's own.
            clock, wall: Seconds that never go back; seconds since 1970.

        Raises:
            ConfigError: Another process uses one of the directories, or O_DIRECT is required and refused; or there is
                no memory for the index.
        """
        self.config = config
        rows = config.max_chunks or max(1024, len(config.paths) * config.capacity_nbytes // ROW_NBYTES_OF_SSD)
        self._common = Common(Index(rows, now_s=wall()), arena, groups, wall)
        self._clock = clock
        common = self._common
        for number, path in enumerate(config.paths):
            volume = Volume(path / directory, segment_nbytes=config.segment_nbytes, direct=config.direct)
            common.drives.append(Drive(number, volume, config, common, clock))
        try:
            for drive in common.drives:
                self._open(drive)
        except ConfigError:
            for drive in common.drives:
                drive.volume.close()
            raise
        for drive in common.drives:
            drive.start()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="raykv-ssd-watch", daemon=True)
        self._watcher.start()

    def _open(self, drive: Drive) -> None:
        try:
            drive.volume.open()
        except OSError as error:
            with self._common.lock:
                drive.fail(error)

    # -- what is here -----------------------------------------------------------------------------------------------

    def has(self, keys: KeyArray) -> Bits:
        """See `Tier`."""
        with self._common.lock:
            here: Bits = self._common.index.look(keys, now_s=self._common.wall()) >= 0
        return here

    def find(self, keys: KeyArray) -> list[Found | None]:
        """See `Tier`."""
        with self._common.lock:
            index = self._common.index
            rows = index.look(keys, now_s=self._common.wall())
            return [index.found(row) if row >= 0 else None for row in rows.tolist()]

    def keys(self) -> KeyArray:
        """See `Tier`."""
        with self._common.lock:
            return self._common.index.keys(self._common.index.ready())

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `Tier`. What came and went again in between is told as gone."""
        with self._common.lock:
            keys = self._common.take_changes()
            here = self._common.index.look_all(keys) >= 0
        return keys[here], keys[~here]

    def used_nbytes(self, group: int | None = None) -> int:
        """See `Tier`."""
        with self._common.lock:
            nbytes = self._common.index.nbytes
            return int(nbytes.sum() if group is None else nbytes[group])

    def used_chunks(self, group: int | None = None) -> int:
        """How many chunks are here, of one quota group or of all."""
        with self._common.lock:
            chunks = self._common.index.chunks
            return int(chunks.sum() if group is None else chunks[group])

    # -- down and up ------------------------------------------------------------------------------------------------

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """See `Tier`."""
        texts = {group: self._common.groups.text(group) for group in {chunk.group for chunk in chunks}}
        request = results(0, lambda good: done(taken_chunks, good))
        common = self._common
        with common.lock:
            if common.ended or not any(drive.on for drive in common.drives):
                common.refused += len(chunks)
                return 0
            common.texts.update(texts)
            here = common.index.look(key_array([chunk.key for chunk in chunks]), now_s=common.wall()) >= 0
            taken = 0
            for chunk, is_here in zip(chunks, here.tolist(), strict=True):
                if not is_here and not self._queue(chunk, request, taken, texts[chunk.group]):
                    break
                if is_here:
                    request.results.append(True)
                taken += 1
            common.refused += len(chunks) - taken
            taken_chunks = chunks[:taken]
            if taken and not request.left:
                common.finished.append(request)
            for drive in common.drives:
                drive.wake.notify()
        return taken

    def _queue(self, chunk: Chunk, request: Request, place: int, text: bytes) -> bool:
        """Queue one chunk, or know already that it will not be written. False: the queue is full."""
        common = self._common
        coming = common.coming.get(chunk.key)
        if coming is not None and not coming.cancelled:
            coming.waiting.append((request, place))
        elif coming is not None or not self._fits(chunk):  # one that was deleted is still being written
            common.refused += 1
            request.results.append(False)
            return True
        elif len(common.queue) >= QUEUED_CHUNKS or common.queued_nbytes + chunk.nbytes > QUEUED_NBYTES:
            return False
        else:
            view = common.arena[chunk.offset : chunk.offset + blocks_of(chunk.nbytes) * BLOCK_NBYTES]
            item = Item(
                key=chunk.key,
                view=view,
                nbytes=chunk.nbytes,
                checksum=chunk.checksum,
                group=chunk.group,
                text=text,
                depth=chunk.depth,
                parent=chunk.parent,
                reads=min(chunk.reads, 0xFFFFFFFF),
                expires_s=chunk.expires_s,
            )
            item.waiting.append((request, place))
            common.coming[chunk.key] = item
            common.queue.append(item)
            common.queued_nbytes += chunk.nbytes
        request.results.append(False)
        request.left += 1
        return True

    def _fits(self, chunk: Chunk) -> bool:
        """Whether a chunk can be written at all: into a segment, beside two records, and into its quota group's quota."""
        quota = self._common.quotas.get(chunk.group)
        most = self.config.segment_nbytes - 4 * BLOCK_NBYTES
        return chunk.nbytes <= min(most, QUEUED_NBYTES) and (quota is None or chunk.nbytes <= quota)

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """See `Tier`."""
        common = self._common
        request = results(len(keys), done)
        with common.lock:
            if common.ended or not any(drive.readable for drive in common.drives):
                common.refused += len(keys)
                return False
            index = common.index
            rows = index.look(keys, now_s=common.wall())
            pieces: dict[int, list[Piece]] = {}
            segments = index.segment[rows].tolist()
            blocks, nbytes = index.columns.page[rows].tolist(), index.columns.nbytes[rows].tolist()
            checksums = index.columns.checksum[rows].tolist()
            for place, row in enumerate(rows.tolist()):
                drive, segment = divmod(segments[place], SEGMENTS)
                same = row >= 0 and is_same(found[place], nbytes[place], checksums[place])
                if same and common.drives[drive].readable:
                    pieces.setdefault(drive, []).append(
                        Piece(
                            row=row,
                            segment=segment,
                            block=blocks[place],
                            nbytes=nbytes[place],
                            checksum=checksums[place],
                            offset=offsets[place],
                            request=request,
                            place=place,
                        )
                    )
            if any(common.drives[number].reads_queued + len(some) > QUEUED_READS for number, some in pieces.items()):
                common.refused += len(keys)
                return False
            request.left = sum(map(len, pieces.values()))
            for number, some in pieces.items():
                common.drives[number].queue_reads(some)
            if not request.left:
                common.finished.append(request)
                for each in common.drives:
                    each.wake.notify()
        return True

    # -- forgetting -------------------------------------------------------------------------------------------------

    def delete(self, keys: KeyArray) -> int:
        """See `Tier`. It holds across a restart as soon as it is written, ahead of all else; see `flush`."""
        common = self._common
        with common.lock:
            here = int((common.index.look(keys, now_s=common.wall()) >= 0).sum())
            rows = np.unique(common.index.look_all(keys))
            common.forget(rows[rows >= 0], tell=True)
            raw = raw_keys(keys)
            for key in raw:
                item = common.coming.get(key)
                if item is not None and not item.cancelled:
                    common.cancel(item)
            for drive in common.drives:
                if drive.scan.forget(raw) or drive.state != "on":
                    drive.remember_gone(raw)
                drive.notify()
        return here

    def drop(self, group: int) -> int:
        """See `Tier`, and `delete`."""
        text = self._common.groups.text(group)
        common = self._common
        with common.lock:
            index = common.index
            text = text or common.texts.get(group, b"")
            rows = index.rows_where(index.columns.namespace[index.used()] == group)
            common.forget(rows, tell=False)
            for item in list(common.coming.values()):
                if item.group == group and not item.cancelled:
                    common.cancel(item)
            for drive in common.drives:
                if text:
                    drive.scan.forget(text=text)
                    drive.dropped[text] = None
                drive.notify()
            common.texts.pop(group, None)
            common.quotas.pop(group, None)
        return len(rows)

    def set_quota(self, group: int, nbytes: int | None) -> None:
        """Bound what an quota group's chunks may take; the oldest go when it is more. None: no bound but the capacity."""
        common = self._common
        with common.lock:
            if nbytes is None:
                common.quotas.pop(group, None)
                return
            common.quotas[group] = nbytes
            common.enforce([group])
            for drive in common.drives:
                drive.notify()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was deleted and dropped is written down, so that no start finds it.

        Returns:
            False if it is not by then, or there is a path that takes nothing now.
        """
        common, until_s = self._common, self._clock() + timeout_s
        with common.lock:
            while any(drive.tells_pending() for drive in common.drives):
                left_s = until_s - self._clock()
                if left_s <= 0 or not any(drive.on for drive in common.drives if drive.tells_pending()):
                    return False
                common.told.wait(left_s)
        return True

    # -- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look after the paths, until the tier is closed."""
        tidied_s = self._clock()
        while not self._stop.wait(min(WATCH_S, self.config.io_timeout_s / 4)):
            with self._common.lock:
                for drive in self._common.drives:
                    self._look_after(drive)
                if self._clock() - tidied_s >= TIDY_S:
                    tidied_s = self._clock()
                    for drive in self._common.drives:
                        drive.check()
                    index = self._common.index
                    over = index.over(index.used(), now_s=self._common.wall())
                    self._common.forget(index.rows_where(over), tell=False)
            self._call_back()  # the others may all be waiting for a disk

    def _look_after(self, drive: Drive) -> None:
        slow = drive.io is not None and drive.io.longest_s() > self.config.io_timeout_s
        if slow and not drive.slow:
            log.warning("SSD path %s is slow: nothing for %s s", drive.volume.path, self.config.io_timeout_s)
            self._common.timeouts += 1
            drive.refuse_reads()
        if slow != drive.slow:
            drive.slow = slow
            self._common.fail_queue_if_off()
        drive.retry()
        drive.notify()

    def stats(self) -> dict[str, Any]:
        """See `Tier`; and `paths`: the state of each, with segments, free_segments, direct and queued_reads."""
        common = self._common
        with common.lock:
            paths = [drive.stats() for drive in common.drives]
            states = [path["state"] for path in paths]
            worst = next(
                path for state in ("off", "slow", "starting", "on") for path in paths if path["state"] == state
            )
            state = "off" if all(each == "off" for each in states) else "on"
            state = next((each for each in ("slow", "starting") if each in states), state) if state == "on" else state
            return {
                "state": state,
                "reason": f"{worst['path']}: {worst['reason']}" if worst["reason"] else "",
                "chunks": len(common.index),
                "used_nbytes": int(common.index.nbytes.sum()),
                "capacity_nbytes": self.config.capacity_nbytes * len(paths),
                "written_nbytes": common.written_nbytes,
                "disk_nbytes": common.disk_nbytes,
                "moved_nbytes": common.moved_nbytes,
                "read_nbytes": common.read_nbytes,
                "queued_nbytes": common.queued_nbytes,
                "refused": common.refused,
                "timeouts": common.timeouts,
                "errors": common.errors,
                "corrupt": common.corrupt,
                "paths": paths,
            }

    def close(self) -> None:
        """See `Tier`. What is being written is finished, and so is what is to be told to be gone."""
        common = self._common
        self._stop.set()
        self._watcher.join()
        with common.lock:
            if common.ended:
                return
            common.ended = True
            common.fail_queue_if_off()
            for drive in common.drives:
                drive.refuse_reads()
                drive.notify()
        for drive in common.drives:
            if drive.io is not None and drive.io.join(CLOSE_S):
                drive.volume.close()
        self._call_back()

    def _call_back(self) -> None:
        while self._common.finished:
            try:
                request = self._common.finished.popleft()
            except IndexError:
                return  # another thread took the last one
            request.call()
