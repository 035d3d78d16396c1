"""File operations on a pack directory: names, contents, publishing. Methods wait for the file system."""

import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

import numpy as np

from raykv.tier.segments.format import (
    BLOCK_NBYTES,
    ENTRY,
    HEAD,
    SUMMARY,
    Record,
    claimed_blocks,
    read_segment,
    tombstones_of,
)
from raykv.tier.segments.volume import encoded, make_directory, transfer, write_all

Kind = Literal["part", "pack", "tombs"]
VANISHED: Final = frozenset({errno.ENOENT, errno.ESTALE})
"""If another node has removed a file, an access to the file fails with one of these errors."""
PROBE_NBYTES: Final = 64 << 10
WRITE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME: Final = re.compile(r"(\d{19})-(.{1,180})-([0-9a-f]{8})\.(part|pack|tombs)")


class Name(NamedTuple):
    """The name of a file in a pack directory.

    Attributes:
        sequence: Time when the file was begun, in ns since 1970. It is increased if the file must come after another
            file. Of two copies of a chunk, the one in the pack with the higher sequence wins.
        writer: Name of the node that wrote the file.
        token: Random text that stands for the process that wrote the file.
        kind: "part": a pack that is being filled. "pack": a finished pack. "tombs": a file of tombstones.
    """

    sequence: int
    writer: str
    token: str
    kind: Kind

    @property
    def stem(self) -> str:
        """The name without its extension. It stays the same when a part becomes a pack."""
        return f"{self.sequence:019}-{self.writer}-{self.token}"

    def __str__(self) -> str:
        return f"{self.stem}.{self.kind}"


class Folder:
    """A pack directory, as one process uses it. Thread-safe.

    The names of files that this process writes contain `writer` and `token`.
    """

    def __init__(self, root: Path, writer: str) -> None:
        self.path = root / "raykv"
        self.writer, self.token = writer, secrets.token_hex(4)
        self._made = False
        self._since: dict[int, float] = {}

    def longest_s(self) -> float:
        """Age of the oldest running operation; 0 if none runs."""
        now_s = time.monotonic()
        return max((now_s - since_s for since_s in list(self._since.values())), default=0.0)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Measure an operation of the calling thread for `longest_s`.

        A nested operation is measured instead of the outer one. When the nested one ends, nothing is measured.
        """
        self._since[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            self._since.pop(threading.get_ident(), None)

    def prepare(self) -> None:
        """Create the directory if it is missing. Only the first call also creates the parent directory.

        If the parent is missing in a later call, the file system was unmounted, and the call raises OSError.
        """
        with self.operation():
            if not self._made:
                make_directory(self.path)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._made = True

    def probe(self, sequence: int) -> None:
        path = self.path / str(self.name(sequence, "part"))
        with self._file(path, WRITE | os.O_CREAT | os.O_EXCL) as fd:
            try:
                write_all(fd, [memoryview(bytes(PROBE_NBYTES))], 0)
                os.fsync(fd)
            finally:
                path.unlink()

    @contextmanager
    def _file(self, path: Path, flags: int = os.O_RDONLY | os.O_CLOEXEC) -> Iterator[int]:
        with self.operation():
            fd = os.open(path, flags, 0o600)
            try:
                yield fd
            finally:
                os.close(fd)

    def name(self, sequence: int, kind: Kind) -> Name:
        return Name(sequence, self.writer, self.token, kind)

    def names(self) -> list[Name]:
        with self.operation(), os.scandir(self.path) as entries:
            matches = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
        return [Name(int(match[1]), match[2], match[3], cast(Kind, match[4])) for match in matches]

    def stat(self, name: Name) -> os.stat_result | None:
        """Return the status of a file; None if it was removed. A part that was published is found as a pack."""
        with self.operation():
            for kind in (name.kind, "pack"):
                try:
                    return os.stat(self.path / f"{name.stem}.{kind}")
                except OSError as error:
                    if error.errno not in VANISHED:
                        raise
        return None

    def remove(self, name: Name) -> None:
        with self.operation():
            try:
                os.unlink(self.path / str(name))
            except OSError as error:
                if error.errno not in VANISHED:
                    raise

    def touch(self, name: Name) -> None:
        """Set a pack's modification time to now, by the file system's clock: the pack is in use now."""
        with self.operation():
            os.utime(self.path / str(name))

    def read(self, name: Name, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers one after another. Returns the number of bytes read: fewer at the end of the file."""
        try:
            with self._file(self.path / str(name)) as fd:
                return transfer(os.preadv, fd, buffers, offset)
        except FileNotFoundError:
            if name.kind != "part":
                raise
            return self.read(name._replace(kind="pack"), offset, buffers)  # the part has become a pack since the lookup

    def record_of(self, name: Name) -> tuple[Record | None, int]:
        """Join all intact records of a file. Returns the joined record and the size of the file's content in bytes.

        The record is None if the file has no intact record.
        """
        with self._file(self.path / str(name)) as fd:
            nbytes = os.fstat(fd).st_size
            found = _records(fd, nbytes)
        if found is None:
            return None, nbytes
        return found[0], (found[0].next_block + found[0].blocks()) * BLOCK_NBYTES

    def write_tombstones(self, name: Name, keys: Sequence[bytes], texts: Sequence[bytes]) -> int:
        """Write and publish a tombstone file. It has one record: a summary. Returns the file's length in bytes."""
        tombstones = tombstones_of(keys, range(len(texts)))
        record = Record(SUMMARY, name.sequence, 1, 0, 0, 0, tuple(texts), np.zeros(0, ENTRY), *tombstones)
        record = record._replace(segment_blocks=record.blocks())
        part = name._replace(kind="part")
        # no O_EXCL: a failed attempt may have left its part
        with self._file(self.path / str(part), WRITE | os.O_CREAT | os.O_TRUNC) as fd:
            try:
                nbytes = write_all(fd, [encoded(record)], 0)
                self.publish(fd, part, "tombs")
            except OSError:
                with suppress(OSError):
                    self.remove(part)
                raise
        return nbytes

    def take_over(self, name: Name) -> None:
        """Publish a part that an earlier process of this node left. A part without chunks is removed.

        A part that another process has locked is left alone. If the file system has no locks, the earlier process may
        still be running. When that process publishes the part, it finds the part published already.
        """
        with self._file(self.path / str(name), WRITE) as fd:
            if not lock(fd):
                return
            found = _records(fd, os.fstat(fd).st_size)
            if found is None or not len(found[0].entries):
                os.unlink(self.path / str(name))
                return
            record, sealed = found
            if not sealed:
                os.ftruncate(fd, record.segment_blocks * BLOCK_NBYTES)
                write_summary(fd, record)
            self.publish(fd, name, "pack")

    def publish(self, fd: int, name: Name, kind: Kind) -> None:
        """Sync a part to the disk, then rename it to its final name. So no reader ever sees an incomplete file."""
        os.fsync(fd)
        final = self.path / f"{name.stem}.{kind}"
        try:
            os.rename(self.path / str(name), final)
        except FileNotFoundError:
            if not final.exists():  # if it exists, another process has published the part
                raise
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system cannot sync directories
                raise
        finally:
            os.close(directory)


def _records(fd: int, nbytes: int) -> tuple[Record, bool] | None:
    """Read a file's records as `read_segment` does. The end of the file may be missing."""

    def read(offset: int, size: int) -> memoryview:
        buffer = memoryview(bytearray(min(size, max(0, nbytes - offset))))
        return buffer[: transfer(os.preadv, fd, [buffer], offset)]

    blocks = nbytes // BLOCK_NBYTES
    if not blocks:
        return None
    found = read_segment(read, segment_blocks=blocks, blocks_there=blocks)
    first = read(0, BLOCK_NBYTES)
    if found is None and claimed_blocks(first):  # the end of the file may be missing
        once = int(np.frombuffer(first, HEAD, 1)[0]["segment_blocks"])
        found = read_segment(read, segment_blocks=once, blocks_there=blocks) if once > blocks else None
    return found


def write_summary(fd: int, record: Record) -> int:
    """Write a summary to the end of its segment. Returns the summary's length in bytes."""
    view = encoded(record)
    return write_all(fd, [view], record.segment_blocks * BLOCK_NBYTES - len(view))


def lock(fd: int) -> bool:
    """Lock a file for this process. Returns False only if another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks: two processes may do the same work, which is safe
    return True
