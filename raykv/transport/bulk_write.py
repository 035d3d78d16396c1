"""Writes chunks to another node over a link."""

from collections.abc import Sequence

from raykv.errors import LostError, ProtocolError
from raykv.memory.copying import checksums_of
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect
from raykv.protocol.namespace import Namespace
from raykv.transport.base import Runs
from raykv.transport.link import Link
from raykv.types import Batch


class BulkWrite:
    """A Write request, with the bytes of its chunks. The request may be sent again after an error.

    Attributes:
        positions: Indices in the batch of the chunks that the node wanted at the last attempt.
        full: Number of chunks that did not fit at the last attempt.
    """

    def __init__(
        self,
        group: Namespace,
        batch: Batch,
        values: Sequence[Sequence[memoryview]],
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
        self._checksums = bytearray()
        self.positions: list[int] = []
        self.full = 0

    def send(self, link: Link, *, deadline_s: float) -> int:
        """Write the chunks that the node lacks. If the node does not know the quota group, open it first.

        Returns:
            The number of chunks that the node has stored.

        Raises:
            RayKVError: The errors of `Link.push`.
        """
        try:
            return self._send_once(link, deadline_s)
        except LostError:
            fields = self._group.model_dump_json(exclude_defaults=True)
            link.call(messages.OpenNamespace(fields.encode(), group=self._group.digest), deadline_s=deadline_s)
            return self._send_once(link, deadline_s)

    def _send_once(self, link: Link, deadline_s: float) -> int:
        batch = self._batch
        parent = b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent)
        request = messages.Write(
            chunk_keys.to_bytes(batch.keys), batch.nbytes, batch.chained, parent, batch.depth, *batch.hints,
            group=self._group.digest, evict=self._evict, below=self._below, replica=self._replica,
        )  # fmt: skip
        return expect(messages.Count, link.push(request, self._pick, self._closing, deadline_s=deadline_s)).count

    def _pick(self, answer: messages.Answer) -> Runs:
        accepted = expect(messages.Accepted, answer)
        self.positions = array(accepted.positions, "<i4", len(accepted.positions) // 4).tolist()
        self.full = accepted.full
        if not all(0 <= position < len(self._values) for position in self.positions):
            raise ProtocolError("the node accepted a position outside the request")
        self._checksums = bytearray()
        return hashed(self._values, self.positions, self._checksums)

    def _closing(self) -> messages.Message:
        return messages.Checksums(bytes(self._checksums))


def hashed(values: Sequence[Sequence[memoryview]], places: Sequence[int], checksums: bytearray) -> Runs:
    """Yield the payload of a Write: the values at `places`. Append the checksum (u64) of each to `checksums`.

    Each chunk is hashed just before it is sent, so that its bytes are read from memory only once.
    """
    for place in places:
        checksums += checksums_of([values[place]])
        yield values[place]
