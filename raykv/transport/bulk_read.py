"""Chunks on their way over a connection: those of a `get` that have arrived, those of a `put` that go out."""

import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.errors import ProtocolError
from raykv.memory.copying import checksum_of, checksums_of
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.transport.base import RUN_NBYTES, ChunkRun, Link, Runs, Targets
from raykv.types import Bits, GetResult, KeyArray, NodeId, Path

PART_NBYTES: Final = 8 << 20
PART_KEYS: Final = 256
"""A holder is asked for this much at once, so that it pins no more while it sends."""
PARTS_AHEAD: Final = 2
"""Requests under way on one connection: the holder looks up the next part while this one travels."""
SCRAP_NBYTES: Final = 1 << 20


class ReadProgress:
    """Which chunks of one `get` have arrived so far."""

    def __init__(self, keys: KeyArray, targets: list[list[memoryview]], sizes: list[int]) -> None:
        """Nothing has.

        Args:
            keys, targets, sizes: One entry a chunk; `sizes` are the lengths of `targets` in bytes.
        """
        self.keys, self.targets, self.sizes = keys, targets, sizes
        self._raw, self._total = chunk_keys.to_bytes(keys), sum(sizes)
        self.hits, self._count = [False] * len(keys), 0
        self._nbytes: dict[Path, int] = {}
        self._chunks: dict[tuple[NodeId, Path], int] = {}

    def raw_key(self, place: int) -> bytes:
        """One of the keys, as 16 bytes."""
        return self._raw[KEY_NBYTES * place : KEY_NBYTES * (place + 1)]

    def raw_keys(self, places: Sequence[int]) -> bytes:
        """Those at rising places, 16 bytes each."""
        if places[-1] - places[0] + 1 == len(places):
            return self._raw[KEY_NBYTES * places[0] : KEY_NBYTES * (places[-1] + 1)]
        return b"".join(map(self.raw_key, places))

    def all_came(self) -> bool:
        """Whether there is nothing left to arrive."""
        return self._count == len(self.hits)

    def missing(self) -> list[int]:
        """Places of what has not."""
        if self._count in (0, len(self.hits)):
            return list(range(len(self.hits) - self._count))
        return [place for place, hit in enumerate(self.hits) if not hit]

    def nbytes(self, places: Sequence[int]) -> int:
        """Bytes of the chunks at rising places."""
        return self._total if len(places) == len(self.hits) else sum([self.sizes[place] for place in places])

    def targets_at(self, places: Sequence[int]) -> list[list[memoryview]]:
        """Buffers of the chunks at rising places."""
        return self.targets if len(places) == len(self.hits) else [self.targets[place] for place in places]

    def note(self, places: npt.NDArray[np.int64], hits: Bits, node_id: NodeId, path: Path) -> None:
        """Of the chunks at `places`, those in `hits` came from that node by that path."""
        self.came(places[hits].tolist(), node_id, path)

    def came(self, places: Sequence[int], node_id: NodeId, path: Path) -> None:
        """The chunks at `places`, none of which had, came from that node by that path."""
        if places:
            if len(places) == len(self.hits):
                self.hits = [True] * len(places)
            else:
                for place in places:
                    self.hits[place] = True
            self._count += len(places)
            self._nbytes[path] = self._nbytes.get(path, 0) + self.nbytes(places)
            self._chunks[node_id, path] = self._chunks.get((node_id, path), 0) + len(places)

    def result(self) -> GetResult:
        return GetResult(tuple(self.hits), self._nbytes, self._chunks)


class BulkRead:
    """Those chunks of one `get` that one holder is asked for, over one connection.

    Or their owner, which may hold them: it names the holders of what it has not got, and once it has named one, it is
    asked for no more.

    Attributes:
        places: Of the chunks, in the `get`.
        arrived: Places whose buffers are right by now, also when `run` was broken off.
        gone: Places that the holder does not have.
        spoilt: Places whose bytes are not what the holder said.
        told: By place, holders that the owner named, as it named them.
        asked: Places that the holder has answered for.
        path: By which they came.
    """

    def __init__(self, progress: ReadProgress, places: list[int], *, verify: bool, owner: bool = False) -> None:
        self._progress, self._verify, self._owner = progress, verify, owner
        self.places = places
        self.arrived: list[int] = []
        self.gone: list[int] = []
        self.spoilt: list[int] = []
        self.told: dict[int, tuple[NodeId, ...]] = {}
        self.asked: list[int] = []
        self.path: Path = "tcp"
        self._elsewhere = False
        self._run: ChunkRun | None = None
        self._due: tuple[list[int], bytes] = [], b""
        """Places of the chunks in the run under way, and their checksums as the holder announced them."""

    @property
    def nbytes(self) -> int:
        """Bytes to come."""
        return self._progress.nbytes(self.places)

    def run(self, link: Link, deadline_s: float) -> None:
        """Read over `link` what has not arrived. May be called again, with another link, after it raised.

        Raises:
            RayKVError: As `Link.collect` does; the link is closed.
        """
        self.path = link.path
        self.gone, self.spoilt, self._elsewhere = [], [], False
        waiting = deque(self._parts())
        under_way: deque[list[int]] = deque()
        try:
            while True:
                while waiting and len(under_way) < PARTS_AHEAD and not self._elsewhere:
                    part = waiting.popleft()
                    link.post(messages.Read(self._progress.raw_keys(part), self._owner), deadline_s=deadline_s)
                    under_way.append(part)
                if not under_way:
                    break
                link.collect(partial(self._place, under_way.popleft()), deadline_s=deadline_s)
        except BaseException:
            link.close()  # more answers may be on their way
            self._check(whole=False)
            raise
        if self.spoilt:  # it looks for itself, and drops what is wrong before anybody asks again
            link.call(messages.Suspect(chunk_keys.to_bytes(self._progress.keys[self.spoilt])), deadline_s=deadline_s)

    def _parts(self) -> list[list[int]]:
        """Places of what has not arrived, in the shares of single requests."""
        if not self.arrived and len(self.places) <= PART_KEYS and self.nbytes <= PART_NBYTES:
            return [self.places]
        done = set(self.arrived)
        parts: list[list[int]] = []
        room = 0
        for place in self.places:
            if place not in done:
                size = self._progress.sizes[place]
                if not parts or room < size or len(parts[-1]) == PART_KEYS:
                    parts.append([])
                    room = PART_NBYTES
                parts[-1].append(place)
                room -= size
        return parts

    def _place(self, part: list[int], answer: messages.Answer) -> Targets:
        """The buffers for the payload."""
        reading = messages.expect(messages.Reading, answer)
        lengths = announced(reading, len(part))
        if self._owner:
            self.asked += part
            if 0 in lengths:
                lacking = [place for place, length in zip(part, lengths, strict=True) if not length]
                named = located(reading, len(lacking))
                self.told.update(zip(lacking, named, strict=True))
                self._elsewhere |= any(named)
        sizes = self._progress.sizes
        wanted = sizes if len(part) == len(sizes) else [sizes[place] for place in part]
        if 0 not in lengths and list(lengths) == wanted:  # nearly always
            yield self._begin_run(part, lengths, reading.checksums)
            self._check()
            return
        places: list[int] = []
        checksums = b""
        for number, (place, length) in enumerate(zip(part, lengths, strict=True)):
            if not length:
                if not self._owner:
                    self.gone.append(place)
            elif length == sizes[place]:
                places.append(place)
                checksums += reading.checksums[8 * number : 8 * number + 8]
            else:
                if places:
                    yield self._begin_run(places, [sizes[each] for each in places], checksums)
                    self._check()
                    places, checksums = [], b""
                yield drain(length)
        if places:
            yield self._begin_run(places, [sizes[each] for each in places], checksums)
            self._check()

    def _begin_run(self, places: list[int], lengths: Sequence[int], checksums: bytes) -> ChunkRun:
        """What comes next: these chunks, as the holder announced them."""
        self._run = run = ChunkRun(self._progress.targets_at(places), lengths, hashed=self._verify)
        self._due = places, checksums
        return run

    def _check(self, *, whole: bool = True) -> None:
        """Tell right chunks from wrong ones among those of the run that are full: all of them, if it is `whole`."""
        run, (places, checksums) = self._run, self._due
        if run is None:
            return
        if not whole:
            places = places[: run.full]
        if self._verify:
            found = run.checksums[: 8 * len(places)]
            found += checksums_of(run.chunks[len(found) // 8 : len(places)])
            if found != checksums[: len(found)]:
                right = [found[at : at + 8] == checksums[at : at + 8] for at in range(0, len(found), 8)]
                self.spoilt += [place for place, fine in zip(places, right, strict=True) if not fine]
                places = [place for place, fine in zip(places, right, strict=True) if fine]
        self.arrived += places
        self._run = None


class One(NamedTuple):
    """What became of one chunk that one holder was asked for.

    Attributes:
        path: By which it arrived, if it did.
        gone: Whether the holder does not have it.
        told: Holders that it named.
        spoilt: Whether its bytes were not what the holder said.
    """

    path: Path | None
    gone: bool
    told: tuple[NodeId, ...] = ()
    spoilt: bool = False


def load_one(
    link: Link, key: bytes, target: memoryview, verify: bool, deadline_s: float, *, owner: bool = False
) -> One:
    """Read the chunk of one 16-byte key into a byte view of its length, from a holder or from its owner."""
    lengths: list[int] = []
    run = ChunkRun([[target]], [len(target)], hashed=verify)

    def place(answer: messages.Answer) -> Targets:
        lengths[:] = announced(messages.expect(messages.Reading, answer), 1)
        return (run,) if lengths[0] == len(target) else (drain(lengths[0]),)

    reading = messages.expect(messages.Reading, link.fetch(messages.Read(key, owner), place, deadline_s=deadline_s))
    if not lengths[0]:
        return One(None, True, located(reading, 1)[0] if owner else ())
    if lengths[0] != len(target):
        return One(None, False)
    if verify and (run.checksums or checksums_of(run.chunks)) != reading.checksums:
        link.call(messages.Suspect(key), deadline_s=deadline_s)
        return One(None, False, spoilt=True)
    return One(link.path, False)


def with_checksums(values: Sequence[Sequence[memoryview]], places: Sequence[int]) -> Runs:
    """What is sent of the values at `places`: their bytes, and behind all of them their checksums, u64 each.

    A chunk is hashed just before it is sent: its bytes are fetched from memory once.
    """
    checksums: list[int] = []
    run: list[memoryview] = []
    nbytes = 0
    for place in places:
        value = values[place]
        checksums.append(checksum_of(value))
        run += value
        nbytes += sum(map(len, value))
        if nbytes >= RUN_NBYTES:
            yield run
            run, nbytes = [], 0
    yield [*run, memoryview(struct.pack(f"<{len(checksums)}Q", *checksums))]


def announced(reading: messages.Reading, count: int) -> tuple[int, ...]:
    """Lengths that a holder announces for `count` keys; there are as many checksums.

    Raises:
        ProtocolError: There are more or fewer.
    """
    if len(reading.nbytes) != 4 * count or len(reading.checksums) != 8 * count:
        raise ProtocolError(f"{len(reading.nbytes)} and {len(reading.checksums)} bytes where {count} entries were due")
    return struct.unpack(f"<{count}I", reading.nbytes)


def located(answer: messages.Located | messages.Reading, count: int) -> list[tuple[NodeId, ...]]:
    """Holders of `count` keys, as an owner names them.

    Raises:
        ProtocolError: It names those of more keys, or of fewer.
    """
    choices = answer.choices
    numbers = messages.array(answer.places, "<i4", count).tolist()
    return [choices[number] if 0 <= number < len(choices) else () for number in numbers]


def drain(nbytes: int) -> list[memoryview]:
    """Views to receive bytes into that nobody wants: the same memory again and again."""
    scrap = memoryview(bytearray(min(nbytes, SCRAP_NBYTES)))
    whole, rest = divmod(nbytes, SCRAP_NBYTES)
    return [scrap] * whole + [scrap[:rest]]
