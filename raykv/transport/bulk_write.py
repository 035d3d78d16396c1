"""Writes chunks to another node over a link. A placer may put their bytes into the node's slots over RDMA."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from raykv.errors import LostError, ProtocolError, TransientError
from raykv.memory.copying import checksums_of
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect, pack_bits
from raykv.protocol.namespace import Namespace
from raykv.transport.base import Runs
from raykv.transport.link import Link
from raykv.types import Batch

Pieces = Sequence[Sequence[memoryview]]
"""For each chunk its buffers, which are joined in order."""


class Placement(NamedTuple):
    """What a placer has done.

    Attributes:
        checksums: Maps the index of each chunk that is in its slot now to the chunk's checksum.
        broken: Whether a connection for the bytes has failed, so that the node must end all of them: see
            `messages.Placed`.
    """

    checksums: dict[int, int]
    broken: bool = False


class Placer(Protocol):
    """Puts chunks straight into the slots that a node has lent for them."""

    def place(self, accepted: messages.Accepted, values: Pieces, *, deadline_s: float) -> Placement:
        """Write chunks into their slots. When this method has returned or raised, nothing is under way any more.

        Args:
            accepted: The node's answer, with a slot for each of `values`.
            values: The chunks, all of one size. The caller sends those that are not placed over the link.
            deadline_s: When to give up.

        Raises:
            PeerUnavailable: The deadline has passed.
            ProtocolError: The answer is wrong.
        """
        ...


class BulkWrite:
    """A Write request, with the bytes of its chunks. The request may be sent again after an error.

    Attributes:
        positions: Indices in the batch of the chunks that the node wanted at the last attempt.
        full: Number of chunks that did not fit at the last attempt.
        offered: Indices of the chunks that an attempt without an answer may have stored.
    """

    def __init__(
        self,
        group: Namespace,
        batch: Batch,
        values: Pieces,
        *,
        evict: bool = True,
        below: bool = False,
        replica: bytes = b"",
    ) -> None:
        """Prepare to write a batch.

        Args:
            group: The chunks' quota group.
            batch: The keys and their chain.
            values: For each chunk its buffers, which are joined in order.
            evict: Whether the node may evict other chunks to make room.
            below: Whether the node must store the chunks in a tier below memory, without replacing others.
            replica: Key of the first chunk of the hot prefix, if the chunks are replicas; otherwise empty.
        """
        self._group, self._batch, self._values = group, batch, values
        self._evict, self._below, self._replica = evict, below, replica
        self._placer: Placer | None = None
        self._deadline_s = 0.0
        self._placed: dict[int, int] = {}  # checksums of the chunks that the placer has placed
        self._sent = bytearray()  # checksums of the other chunks
        self.positions: list[int] = []
        self.full = 0
        self.offered: set[int] = set()

    def send(self, link: Link, placer: Placer | None = None, *, deadline_s: float) -> int:
        """Write the chunks that the node lacks. If the node does not know the quota group, open it first.

        Args:
            link: The link for the request, and for the bytes that the placer does not place.
            placer: Places the chunks over the queue pairs of this link. None: all bytes go over the link.
            deadline_s: When to give up.

        Returns:
            The number of chunks that the node has stored.

        Raises:
            RayKVError: The errors of `Link.push`.
        """
        self._placer, self._deadline_s = placer, deadline_s
        try:
            return self._send_once(link)
        except LostError:
            fields = self._group.model_dump_json(exclude_defaults=True)
            link.call(messages.OpenNamespace(fields.encode(), group=self._group.digest), deadline_s=deadline_s)
            return self._send_once(link)
        except TransientError:
            self.offered.update(self.positions)
            raise

    def _send_once(self, link: Link) -> int:
        batch, opening = self._batch, None if self._placer is None else self._opening
        parent = b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent)
        request = messages.Write(
            chunk_keys.to_bytes(batch.keys), batch.nbytes, batch.chained, parent, batch.depth, *batch.hints,
            group=self._group.digest, evict=self._evict, below=self._below, replica=self._replica,
            rdma=opening is not None,
        )  # fmt: skip
        self._placed = {}
        answer = link.push(request, self._pick, self._closing, opening=opening, deadline_s=self._deadline_s)
        return expect(messages.Count, answer).count

    def _opening(self, answer: messages.Answer) -> messages.Message:
        accepted = self._accept(answer)
        assert self._placer is not None
        values = [self._values[position] for position in self.positions]
        self._placed, broken = self._placer.place(accepted, values, deadline_s=self._deadline_s)
        places = np.zeros(len(values), np.bool_)
        places[list(self._placed)] = True
        return messages.Placed(pack_bits(places), broken)

    def _accept(self, answer: messages.Answer) -> messages.Accepted:
        accepted = expect(messages.Accepted, answer)
        self.positions = array(accepted.positions, "<i4", len(accepted.positions) // 4).tolist()
        self.full = accepted.full
        if not all(0 <= position < len(self._values) for position in self.positions):
            raise ProtocolError("the node accepted a position outside the request")
        return accepted

    def _pick(self, answer: messages.Answer) -> Runs:
        self._accept(answer)
        self._sent = bytearray()
        rest = [position for place, position in enumerate(self.positions) if place not in self._placed]
        return hashed(self._values, rest, self._sent)

    def _closing(self) -> messages.Message:
        if not self._placed:
            return messages.Checksums(bytes(self._sent))
        sent = iter(np.frombuffer(self._sent, "<u8").tolist())
        checksums = [
            self._placed[place] if place in self._placed else next(sent) for place in range(len(self.positions))
        ]
        return messages.Checksums(np.array(checksums, "<u8").tobytes())


def hashed(values: Pieces, places: Sequence[int], checksums: bytearray) -> Runs:
    """Yield the payload of a Write: the values at `places`. Append the checksum (u64) of each to `checksums`.

    Each chunk is hashed just before it is sent, so that its bytes are read from memory only once.
    """
    for place in places:
        checksums += checksums_of([values[place]])
        yield values[place]
