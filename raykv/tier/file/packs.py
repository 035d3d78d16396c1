"""The files of a directory of packs: their names, what may be believed of them, and how one is published.

Who calls these methods waits for the file system; how long the one under way takes, `Folder.longest_s` tells.
"""

import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from raykv.tier.segments.format import (
    BLOCK_NBYTES,
    DROPPED,
    ENTRY,
    GONE,
    HEAD,
    SUMMARY,
    Record,
    blocks_needed,
    claimed_blocks,
    encode,
    read_segment,
)
from raykv.tier.segments.log import Log
from raykv.tier.segments.volume import IOV_MAX, aligned

Kind = Literal["part", "pack", "gone"]
VANISHED: Final = frozenset({errno.ENOENT, errno.ESTALE})
"""What is said of a file that somebody else has removed."""
PROBE_NBYTES: Final = 64 << 10
_NAME: Final = re.compile(r"(\d{19})-(.{1,180})-([0-9a-f]{8})\.(part|pack|gone)")


class Name(NamedTuple):
    """A file's name.

    Attributes:
        sequence: Nanoseconds since 1970 when the file was begun. Of two files that speak of a key the later one holds.
        writer, token: The node, and the process of it, that wrote the file.
    """

    sequence: int
    writer: str
    token: str
    kind: Kind

    @property
    def stem(self) -> str:
        """The name that stays when a part becomes a pack."""
        return f"{self.sequence:019}-{self.writer}-{self.token}"

    def __str__(self) -> str:
        return f"{self.stem}.{self.kind}"


class Folder:
    """One directory, as one process of a node sees it. Thread-safe.

    Attributes:
        writer, token: Of the names of this process's own files.
    """

    def __init__(self, root: Path, writer: str) -> None:
        """Touches nothing yet.

        Args:
            root: The files lie in the directory "raykv" there.
            writer: Name of the node.
        """
        self.root, self.path = root, root / "raykv"
        self.writer, self.token = writer, secrets.token_hex(4)
        self._made = False
        self._since: dict[int, float] = {}

    def longest_s(self) -> float:
        """How long the operation has been under way that began first; 0 if there is none."""
        now_s = time.monotonic()
        return max((now_s - since_s for since_s in list(self._since.values())), default=0.0)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """One operation of the calling thread, whose time is taken."""
        self._since[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._since[threading.get_ident()]

    def prepare(self) -> None:
        """Make the directory. Its root is made once only: if that is gone later, nothing is mounted there now."""
        with self.operation():
            if not self._made:
                self.root.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
            self._made = True

    def probe(self, sequence: int) -> None:
        """Fail as a write would fail."""
        with self.operation():
            path = self.path / str(self.name(sequence, "part"))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if _all(os.pwritev, fd, [memoryview(bytes(PROBE_NBYTES))], 0) < PROBE_NBYTES:
                    raise OSError(errno.EIO, "nothing was written")
                os.fsync(fd)
            finally:
                os.close(fd)
                path.unlink()

    def name(self, sequence: int, kind: Kind) -> Name:
        """Name of a file of this process."""
        return Name(sequence, self.writer, self.token, kind)

    def names(self) -> list[Name]:
        """All files that are there."""
        found = []
        with self.operation(), os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match:
                    found.append(Name(int(match[1]), match[2], match[3], match[4]))  # type: ignore[arg-type]
        return found

    def stat(self, name: Name) -> os.stat_result | None:
        """What the file system says of a file; None if it is not there. A part may have become a pack meanwhile."""
        with self.operation():
            for kind in (name.kind, "pack"):
                try:
                    return os.stat(self.path / f"{name.stem}.{kind}")
                except OSError as error:
                    if error.errno not in VANISHED:
                        raise
        return None

    def remove(self, name: Name) -> None:
        """Remove a file, if it is there."""
        with self.operation():
            try:
                os.unlink(self.path / str(name))
            except OSError as error:
                if error.errno not in VANISHED:
                    raise

    def touch(self, name: Name) -> None:
        """Mark a pack as used now, by the file system's clock."""
        with self.operation():
            os.utime(self.path / str(name))

    def read(self, name: Name, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill pieces one after another. Returns how many bytes there were.

        Opened for each read: beside the read that costs little, and nobody has to know who still uses which file.
        """
        with self.operation():
            try:
                fd = os.open(self.path / str(name), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if name.kind != "part":
                    raise
                fd = os.open(self.path / f"{name.stem}.pack", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _all(os.preadv, fd, pieces, offset)
            finally:
                os.close(fd)

    def record_of(self, name: Name) -> tuple[Record | None, int]:
        """All that is whole of what a file says; and how many bytes it takes up, as far as can be told from that."""
        with self.operation():
            fd = os.open(self.path / str(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                nbytes = os.fstat(fd).st_size
                found = _records(fd, nbytes)
            finally:
                os.close(fd)
        if found is None:
            return None, nbytes
        return found[0], (found[0].next_block + blocks_needed(found[0])) * BLOCK_NBYTES

    def tell(self, record: Record, name: Name) -> None:
        """Write down and publish what is gone: a file that is one summary.

        An attempt that failed may have left its part, which could not be removed either.
        """
        part = name._replace(kind="part")
        space = aligned(blocks_needed(record) * BLOCK_NBYTES)
        nbytes = encode(record, space) * BLOCK_NBYTES
        with self.operation():
            fd = os.open(self.path / str(part), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, [space[:nbytes]], 0)
                self._publish(fd, part, "gone")
            except OSError:
                self._discard(part)
                raise
            finally:
                os.close(fd)

    def _discard(self, name: Name) -> None:
        """Remove a file of no use, if that is possible."""
        try:
            os.unlink(self.path / str(name))
        except OSError:
            pass

    def take_over(self, name: Name) -> None:
        """Seal a part that an earlier process of this node left, if there is anything in it; else remove it.

        If that process lives after all, and the file system has no locks to tell us, it finds its part sealed.
        """
        with self.operation():
            fd = os.open(self.path / str(name), os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _lock(fd):
                    return
                found = _records(fd, os.fstat(fd).st_size)
                if found is None or not len(found[0].entries):
                    os.unlink(self.path / str(name))
                    return
                record, sealed = found
                if not sealed:
                    os.ftruncate(fd, record.segment_blocks * BLOCK_NBYTES)
                    _write_summary(fd, record)
                self._publish(fd, name, "pack")
            finally:
                os.close(fd)

    def _publish(self, fd: int, name: Name, kind: Kind) -> None:
        """Give a part its final name, when all of it is sure to survive a power cut."""
        os.fsync(fd)
        final = self.path / f"{name.stem}.{kind}"
        try:
            os.rename(self.path / str(name), final)
        except FileNotFoundError:
            if not final.exists():  # else we did it before, or somebody for us
                raise
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such thing
                raise
        finally:
            os.close(directory)


class Part:
    """The pack that this process is filling. One thread's.

    Attributes:
        name: It is a part until `seal`.
        begun_s: By the monotonic clock.
        broken: Writing to it failed: it gets no more chunks.
        nbytes: What it takes up.
    """

    def __init__(self, folder: Folder, sequence: int, *, nbytes: int) -> None:
        """Make the file."""
        self.name, self.begun_s, self.broken, self.nbytes = folder.name(sequence, "part"), time.monotonic(), False, 0
        self._folder = folder
        self._log = Log(limit=1, segment_blocks=nbytes // BLOCK_NBYTES, incarnation=sequence)
        self._log.made(0)
        self._segment = self._log.begin()
        with folder.operation():
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(folder.path / str(self.name), flags, 0o600)
            try:
                _lock(self._fd)
                os.ftruncate(self._fd, nbytes)
            except OSError:
                os.close(self._fd)
                folder._discard(self.name)
                raise

    def fits(self, *, blocks: int, entries: int, texts: set[bytes]) -> bool:
        """Whether there is room for one more batch of so much."""
        return not self.broken and self._log.fits(blocks=blocks, entries=entries, texts=texts)

    def write(self, entries: Any, texts: tuple[bytes, ...], views: Sequence[memoryview]) -> int:
        """Write a batch that fits. Fills in where each chunk lies. Returns how many bytes were written."""
        gone, dropped = np.zeros(0, GONE), np.zeros(0, DROPPED)
        batch = self._log.place(entries=entries, gone=gone, dropped=dropped, texts=texts, content=None)
        space = aligned(blocks_needed(batch.record) * BLOCK_NBYTES)
        pieces = [space[: encode(batch.record, space) * BLOCK_NBYTES], *views]
        with self._folder.operation():
            try:
                nbytes = _write(self._fd, pieces, batch.start * BLOCK_NBYTES)
                # So that it is on its way to the disk long before it is forced there.
                os.posix_fadvise(self._fd, batch.start * BLOCK_NBYTES, nbytes, os.POSIX_FADV_DONTNEED)
            except OSError:
                self.broken = True
                raise
        self._log.finished(batch)
        self.nbytes = batch.start * BLOCK_NBYTES + nbytes
        return nbytes

    def seal(self) -> Name | None:
        """Publish it. Returns the pack's name; None if nothing was in it, or it was removed: it is gone then.

        Raises:
            OSError: It could not be done now, and may be tried again.
        """
        assert self._segment is not None
        folder = self._folder
        if not self._segment.records:
            folder.remove(self.name)
            self.close()
            return None
        with folder.operation():
            self.nbytes += _write_summary(self._fd, self._log.summary(self._segment))
            try:
                folder._publish(self._fd, self.name, "pack")
            except FileNotFoundError:
                self.close()
                return None
        self.close()
        return self.name._replace(kind="pack")

    def close(self) -> None:
        """Let go of the file. Once: its number may be another file's soon."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def gone_record(sequence: int, keys: Any, texts: Sequence[bytes]) -> Record:
    """What a file of kind "gone" says.

    Args:
        keys: Shape [n, 2], of chunks that were deleted.
        texts: Quota groups that were dropped.
    """
    gone, dropped = np.zeros(len(keys), GONE), np.zeros(len(texts), DROPPED)
    gone["key"], dropped["group"] = keys, np.arange(len(texts))
    record = Record(SUMMARY, sequence, 1, 0, 0, 0, tuple(texts), np.zeros(0, ENTRY), gone, dropped)
    return record._replace(segment_blocks=blocks_needed(record))


def _records(fd: int, nbytes: int) -> tuple[Record, bool] | None:
    """What `segment.read_segment` finds in a file, whole or cut short."""

    def read(offset: int, size: int) -> memoryview:
        space = memoryview(bytearray(min(size, max(0, nbytes - offset))))
        return space[: _all(os.preadv, fd, [space], offset)]

    blocks = nbytes // BLOCK_NBYTES
    if not blocks:
        return None
    found = read_segment(read, segment_blocks=blocks, blocks_there=blocks)
    first = read(0, BLOCK_NBYTES)
    if found is None and claimed_blocks(first):  # it was longer once
        once = int(np.frombuffer(first, HEAD, 1)[0]["segment_blocks"])
        found = read_segment(read, segment_blocks=once, blocks_there=blocks) if once > blocks else None
    return found


def _write_summary(fd: int, record: Record) -> int:
    space = aligned(blocks_needed(record) * BLOCK_NBYTES)
    nbytes = encode(record, space) * BLOCK_NBYTES
    return _write(fd, [space[:nbytes]], record.segment_blocks * BLOCK_NBYTES - nbytes)


def _write(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    nbytes = _all(os.pwritev, fd, pieces, offset)
    if nbytes < sum(map(len, pieces)):
        raise OSError(errno.EIO, "nothing was written")
    return nbytes


def _all(call: Callable[..., int], fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Read or write pieces one after another, as far as it goes. Returns how many bytes that were."""
    left, done = list(pieces), 0
    while left:
        got = call(fd, left[:IOV_MAX], offset + done)
        if not got:
            break
        done += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]
    return done


def _lock(fd: int) -> bool:
    """Take a file for this process, where the file system has locks. False: somebody else has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here; what they prevent is a waste, not an error
    return True
