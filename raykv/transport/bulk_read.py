"""Reads many chunks over a link.

`ReadProgress` is the progress of one `get`. A `ReadRun` is a part of a `get`: chunks that one node (their holder)
serves. `BulkRead` sends the requests for a `ReadRun` and receives the chunks.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from raykv.errors import ProtocolError
from raykv.memory.copying import checksums_of
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import array, expect
from raykv.transport.base import ChunkRun, Targets
from raykv.transport.link import Link
from raykv.types import GetResult, KeyArray, NodeId, Path

PART_NBYTES: Final = 8 << 20
PART_KEYS: Final = 256
"""One request asks for at most PART_KEYS chunks. If it asks for several chunks, they have at most PART_NBYTES bytes in
total. The limits are small because the holder pins the chunks until it has sent them."""
PARTS_AHEAD: Final = 2
"""At most this many requests are in flight on one link. The holder looks up the chunks of one request while the chunks
of the other request are on the network."""
SCRAP_NBYTES: Final = 1 << 20
"""Size of a buffer for bytes that are discarded."""


class ReadProgress:
    """The progress of one `get`. A `place` is the index of a chunk in the `get`. Not thread-safe.

    Attributes:
        keys: Keys of the chunks, shape [n, 2].
        targets: The buffers of each chunk.
        sizes: Length of each chunk in bytes.
        group: Digest of the quota group, for the requests.
        hits: Whether each chunk has arrived.
    """

    def __init__(
        self, keys: KeyArray, targets: list[list[memoryview]], sizes: list[int], *, group: bytes = b""
    ) -> None:
        self.keys, self.targets, self.sizes, self.group = keys, targets, sizes, group
        self._raw = chunk_keys.to_bytes(keys)
        self.hits = [False] * len(keys)
        self._nbytes: dict[Path, int] = {}
        self._chunks: dict[tuple[NodeId, Path], int] = {}

    def missing(self) -> list[int]:
        """Return the indices of the chunks that have not arrived."""
        return [place for place, hit in enumerate(self.hits) if not hit]

    def raw_key(self, place: int) -> bytes:
        """Return the key of one chunk, as 16 bytes."""
        return self._raw[KEY_NBYTES * place : KEY_NBYTES * (place + 1)]

    def raw_keys(self, places: Sequence[int]) -> bytes:
        """Return the keys of several chunks, 16 bytes each."""
        return b"".join(map(self.raw_key, places))

    def nbytes(self, places: Sequence[int]) -> int:
        """Return the total length of several chunks in bytes."""
        return sum([self.sizes[place] for place in places])

    def targets_at(self, places: Sequence[int]) -> list[list[memoryview]]:
        """Return the buffers of several chunks."""
        return [self.targets[place] for place in places]

    def cut(self, places: Sequence[int], *, nbytes: int, keys: int) -> list[list[int]]:
        """Split indices into parts of at most `keys` chunks and `nbytes` bytes, or one larger chunk."""
        parts: list[list[int]] = []
        room = 0
        for place in places:
            size = self.sizes[place]
            if not parts or room < size or len(parts[-1]) == keys:
                parts.append([])
                room = nbytes
            parts[-1].append(place)
            room -= size
        return parts

    def record_run(self, run: "ReadRun") -> None:
        """Record the chunks of a run that have arrived. The caller must not record a chunk twice."""
        over_tcp = set(run.over_tcp)
        self.record([place for place in run.arrived if place not in over_tcp], run.holder, run.path)
        self.record(run.over_tcp, run.holder, "tcp")

    def record(self, places: Sequence[int], node_id: NodeId, path: Path) -> None:
        """Record chunks that have arrived from a node. The caller must not record a chunk twice."""
        for place in places:
            self.hits[place] = True
        if places:
            self._nbytes[path] = self._nbytes.get(path, 0) + self.nbytes(places)
            self._chunks[node_id, path] = self._chunks.get((node_id, path), 0) + len(places)

    def result(self) -> GetResult:
        return GetResult(tuple(self.hits), self._nbytes, self._chunks)


@dataclass(slots=True)
class ReadRun:
    """Chunks of one `get` to read from one holder, and the outcome. The outcome is also valid after an error.

    Attributes:
        progress: The progress of the `get`.
        holder: The node to read from.
        places: Indices in the `get` of the chunks to read, in rising order.
        locate: Whether the node is asked as the owner of the keys. If so, the node sends the chunks that it has, and
            names holders of the other chunks. For chunks that are neither in `arrived` nor in `named`, the caller must
            look up the holders (`Locate`).
        arrived: Indices of the chunks whose buffers are filled.
        gone: Indices of the chunks that the holder was expected to have, but does not have.
        corrupt: Indices of the chunks whose bytes did not match the checksum. The holder is asked to check the chunks.
        other_size: Indices of the chunks whose length at the holder differs from the buffer's.
        named: Maps the index of a chunk to the holders that the owner named, except `holder`. The tuple may be empty.
        path: The data path of the current attempt.
        over_tcp: Indices of the chunks in `arrived` that arrived over TCP although `path` is another one.
    """

    progress: ReadProgress
    holder: NodeId
    places: list[int]
    locate: bool = False
    arrived: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    other_size: list[int] = field(default_factory=list)
    named: dict[int, tuple[NodeId, ...]] = field(default_factory=dict)
    path: Path = "tcp"
    over_tcp: list[int] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Indices of the chunks that have not arrived."""
        arrived = set(self.arrived)
        return [place for place in self.places if place not in arrived]

    def begin(self, path: Path) -> None:
        """Start an attempt to read over `path`. Keep `arrived` and `named`, and clear the rest of the outcome."""
        self.path, self.gone, self.corrupt, self.other_size = path, [], [], []

    def merge(self, part: "ReadRun", *, whole: bool = True) -> None:
        """Add the outcome of a run of some of these places. Not `whole`: its missing chunks are asked for again."""
        self.arrived += part.arrived
        self.named |= part.named
        if whole:
            self.gone += part.gone
            self.corrupt += part.corrupt
            self.other_size += part.other_size

    def add_absent(self, places: list[int], choices: Sequence[tuple[NodeId, ...]], numbers: bytes) -> bool:
        """Record the chunks that the node does not have. With `locate`, record also the holders that it names.

        Args:
            places: Indices of these chunks in the `get`.
            choices, numbers: As `choices` and `places` in `messages.Reading`.

        Returns:
            Whether the node has named a holder.

        Raises:
            ProtocolError: `numbers` has another length.
        """
        if not self.locate:
            self.gone += places
            return False
        any_named = False
        for place, number in zip(places, array(numbers, "<i4", len(places)).tolist(), strict=True):
            holders = choices[number] if 0 <= number < len(choices) else ()
            if self.holder in holders:
                self.gone.append(place)
            self.named[place] = tuple([name for name in holders if name != self.holder])
            any_named |= bool(holders)
        return any_named


class BulkRead:
    """Reads a run over one link, in parts. Requests for several parts are in flight at once.

    If the owner of the keys names other holders, no more parts are requested. The caller then looks up the remaining
    chunks in one call.
    """

    def __init__(self, run: ReadRun, *, verify: bool) -> None:
        """Prepare to read the chunks of `run`. `verify`: whether to compare checksums."""
        self._run, self._verify, self._named_any = run, verify, False
        self._filling: ChunkRun | None = None
        self._expected: tuple[list[int], bytes] = [], b""  # indices of the chunks being filled, and expected checksums

    def read(self, link: Link, *, deadline_s: float) -> None:
        """Read the chunks that have not arrived yet. After an error the caller may try again with another link.

        Raises:
            RayKVError: An error of `Link.collect`. If a request for chunks fails, this method closes the link.
        """
        run, progress = self._run, self._run.progress
        run.begin("tcp")
        self._named_any = False
        waiting = deque(progress.cut(run.missing, nbytes=PART_NBYTES, keys=PART_KEYS))
        in_flight: deque[list[int]] = deque()
        try:
            while True:
                while waiting and len(in_flight) < PARTS_AHEAD and not self._named_any:
                    part = waiting.popleft()
                    request = messages.Read(progress.raw_keys(part), run.locate, group=progress.group)
                    link.post(request, deadline_s=deadline_s)
                    in_flight.append(part)
                if not in_flight:
                    break
                link.collect(partial(self._place, in_flight.popleft()), deadline_s=deadline_s)
        except BaseException:
            link.close()  # answers to the requests for other parts may still arrive on this link
            self._check(whole=False)
            raise
        if run.corrupt:  # return only after the holder has dropped these corrupt chunks
            link.call(messages.Suspect(progress.raw_keys(run.corrupt)), deadline_s=deadline_s)

    def _place(self, part: list[int], answer: messages.Answer) -> Targets:
        """Yield the buffers for the payload of one answer."""
        reading = expect(messages.Reading, answer)
        if len(reading.nbytes) != 4 * len(part) or len(reading.checksums) != 8 * len(part):
            raise ProtocolError(f"lengths or checksums for other than {len(part)} keys in the answer to a read")
        lengths: tuple[int, ...] = struct.unpack(f"<{len(part)}I", reading.nbytes)
        if 0 in lengths:
            absent = [place for place, length in zip(part, lengths, strict=True) if not length]
            self._named_any |= self._run.add_absent(absent, reading.choices, reading.places)
        places: list[int] = []
        checksums = b""
        for number, (place, length) in enumerate(zip(part, lengths, strict=True)):
            if length and length == self._run.progress.sizes[place]:
                places.append(place)
                checksums += reading.checksums[8 * number : 8 * number + 8]
            elif length:
                yield from self._fill(places, checksums)
                places, checksums = [], b""
                self._run.other_size.append(place)
                yield drain(length)
        yield from self._fill(places, checksums)

    def _fill(self, places: list[int], checksums: bytes) -> Targets:
        """Yield the buffers of the chunks at `places`. Check the chunks after the transport has filled the buffers."""
        if places:
            progress = self._run.progress
            sizes = [progress.sizes[place] for place in places]
            self._filling = ChunkRun(progress.targets_at(places), sizes, hashed=self._verify)
            self._expected = places, checksums
            yield self._filling
            self._check()

    def _check(self, *, whole: bool = True) -> None:
        """Add the full chunks of the current ChunkRun to `arrived` or `corrupt`.

        `whole` means that all chunks of the ChunkRun are full.
        """
        filling, (places, expected) = self._filling, self._expected
        self._filling = None
        if filling is None:
            return
        if not whole:
            places = places[: filling.full]
        if self._verify:
            found = filling.checksums[: 8 * len(places)]
            found += checksums_of(filling.chunks[len(found) // 8 : len(places)])
            right = [found[at : at + 8] == expected[at : at + 8] for at in range(0, len(found), 8)]
            self._run.corrupt += [place for place, fine in zip(places, right, strict=True) if not fine]
            places = [place for place, fine in zip(places, right, strict=True) if fine]
        self._run.arrived += places


def drain(nbytes: int) -> list[memoryview]:
    """Return buffers for a payload of `nbytes` bytes that is to be discarded. All buffers share the same memory."""
    scrap = memoryview(bytearray(min(nbytes, SCRAP_NBYTES)))
    whole, rest = divmod(nbytes, SCRAP_NBYTES)
    return [scrap] * whole + [scrap[:rest]]
