"""Moves bytes from or to a peer's memory over the rails of a connection. The rails of a host are its RDMA ports."""

from collections.abc import Sequence
from typing import Final

from raykv.errors import ProtocolError
from raykv.protocol import messages
from raykv.protocol.codec import array, expect
from raykv.transport.link import Link
from raykv.transport.one_sided.base import Broken, Item, Late
from raykv.transport.rails.shared import UNKNOWN_RATE, SharedRails
from raykv.transport.rails.striping import Share
from raykv.transport.rdma.device import Device
from raykv.transport.rdma.queue_pair import Piece, QueuePair

PAUSE_S: Final = 2.0
"""A rail that failed is left alone for this long the first time, and for up to four times as long later."""


class LocalRails(SharedRails):
    """The rails of this process's devices, shared by all its transfers. Thread-safe.

    Attributes:
        devices: The port of each rail.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """Make a rail of each port. Its nominal rate is the first weight."""
        self.devices = tuple(devices)
        nominal = [device.gbit_s * 1e9 / 8 or UNKNOWN_RATE for device in devices]
        super().__init__([f"{device.name}:{device.port}" for device in devices], nominal, pause_s=PAUSE_S)


class Connection:
    """The queue pairs that belong to one link: one for each rail. They end with the link.

    Attributes:
        path: Name of the data path.
        ends: Number of queue pairs that were connected.
        pairs: The queue pair of each rail. None: it failed.
        arena, records: Addresses in the peer's process; see `messages.RdmaConnected`.
        record_keys: For each of the `ends`, the key of the registration of the records.
    """

    path: Final = "rdma"

    def __init__(self, link: Link, rails: LocalRails, *, deadline_s: float) -> None:
        """Connect.

        Raises:
            Broken: No device works, or none reaches the peer.
            RayKVError: The node refuses: it has no device. Or an error of `Link.call`.
        """
        self._rails = rails
        self.pairs: list[QueuePair | None] = []
        self._reasons: dict[int, str] = {}  # why the queue pair of a rail failed
        for rail, device in enumerate(rails.devices):
            try:
                self.pairs.append(QueuePair(device))
            except Broken as error:
                self.pairs.append(None)
                self._reasons[rail] = str(error)
        self._end_of: dict[int, int] = {}
        try:
            made = [(rail, pair) for rail, pair in enumerate(self.pairs) if pair is not None]
            self.live(0)
            self.ends = len(made)
            request = messages.ConnectRdma(tuple(pair.end for _, pair in made))
            answer = expect(messages.RdmaConnected, link.call(request, deadline_s=deadline_s))
            if len(answer.ends) != len(made):
                raise ProtocolError(f"{len(answer.ends)} queue pairs in the answer to {len(made)}")
            for number, ((rail, pair), end) in enumerate(zip(made, answer.ends, strict=True)):
                self._end_of[rail] = number
                try:
                    pair.connect(end, remote=0)
                except Broken as error:
                    self.drop(rail, str(error))
                    rails.take_out(rail)  # it is tried again after a pause
            self.live(0)
            self.arena, self.records = answer.arena, answer.records
            self.record_keys = tuple(array(answer.record_keys, "<u4", len(made)).tolist())
        except BaseException:
            self.close()
            raise
        link.at_close.append(self.close)

    def live(self, rail: int) -> int:
        """Return this rail, or the first other one whose queue pair works. Raises Broken if none does."""
        works = [number for number, pair in enumerate(self.pairs) if pair is not None]
        if works:
            return rail if rail in works else works[0]
        raise Broken("; ".join(self._reasons.values()) or "the connection is closed")

    @property
    def working(self) -> int:
        """How many of the queue pairs work."""
        return sum(pair is not None for pair in self.pairs)

    def lacks(self, rails: LocalRails) -> bool:
        """Whether a rail that may be used has no queue pair here, because it failed before."""
        return any(pair is None and rails.admits(rail) for rail, pair in enumerate(self.pairs))

    def readable(self, keys: Sequence[int]) -> bool:
        """Return whether a chunk with these keys of its registration can be read."""
        return all(keys)

    def moving(self, items: Sequence[Item]) -> "Transfer":
        """Prepare to read `items`. Large batches are divided among the rails."""
        return Transfer(self, self._rails, items)

    def key(self, keys: Sequence[int], rail: int) -> int:
        """Return the key for a rail out of `keys`, which has one for each of the `ends`."""
        number = self._end_of[rail]
        return keys[number]

    def drop(self, rail: int, reason: str = "") -> None:
        """Destroy the queue pair of a rail. After that, its device uses no memory of this process any more."""
        if reason:
            self._reasons[rail] = reason
        pair, self.pairs[rail] = self.pairs[rail], None
        if pair is not None:
            pair.close()

    def close(self) -> None:
        """Destroy all queue pairs. When this has returned, no device uses memory of this process any more."""
        for rail in range(len(self.pairs)):
            self.drop(rail)


class Transfer:
    """One batch of bytes to read or to write. What a rail does not move is moved again over the others."""

    def __init__(
        self, connection: Connection, rails: LocalRails, items: Sequence[Item], *, writes: bool = False
    ) -> None:
        """`writes`: whether to write to the peer's memory, instead of reading it."""
        self._connection, self._rails, self._items, self._writes = connection, rails, items, writes
        self._posted: list[tuple[Share, list[int], int, int]] = []  # share, items, the rail that is used, ticket
        self._failed: list[Share] = []

    def start(self, deadline_s: float) -> None:
        """Post the requests. Raises Broken if no rail works."""
        self._start(list(range(len(self._items))), deadline_s)

    def _start(self, places: list[int], deadline_s: float) -> None:
        shares = self._rails.assign([self._items[place].nbytes for place in places])
        if not shares:
            raise Broken("all rails are taken out")
        for number, share in enumerate(shares):
            mine = [places[index] for index in share.indices]
            try:
                self._post(share, mine, deadline_s)
            except BaseException:
                for other in shares[number:]:
                    self._rails.cancel(other)
                raise

    def _post(self, share: Share, places: list[int], deadline_s: float) -> None:
        connection = self._connection
        while True:
            rail = connection.live(share.rail)
            pair = connection.pairs[rail]
            assert pair is not None
            pieces = [
                Piece(item.local, item.lkeys[rail], item.remote, connection.key(item.rkeys, rail), item.nbytes)
                for item in map(self._items.__getitem__, places)
            ]
            post = pair.write if self._writes else pair.read
            try:
                self._posted.append((share, places, rail, post(pieces, deadline_s=deadline_s)))
                return
            except Late:
                raise
            except Broken as error:
                connection.drop(rail, str(error))

    def wait(self, deadline_s: float) -> None:
        """Wait until all bytes were moved.

        A rail that failed is taken out if another one moves its bytes. If none does, it was the peer.

        Raises:
            Late: The deadline has passed.
            Broken: No rail moves the bytes.
        """
        worked = False
        while self._posted:
            share, places, rail, ticket = self._posted[0]
            pair = self._connection.pairs[rail]
            try:
                if pair is None:  # it has failed for an earlier share
                    raise Broken("")
                pair.wait(ticket, deadline_s=deadline_s)
            except Late:
                raise
            except Broken as error:
                self._connection.drop(rail, str(error))  # before its bytes go to the same place again
                del self._posted[0]
                self._failed.append(share)
                self._post_again(share, places, deadline_s)
                continue
            del self._posted[0]
            worked = True
            (self._rails.done if rail == share.rail else self._rails.cancel)(share)
        failed, self._failed = self._failed, []
        for share in failed:
            (self._rails.fail if worked else self._rails.cancel)(share)

    def _post_again(self, share: Share, places: list[int], deadline_s: float) -> None:
        """Post the items of a failed share on another queue pair."""
        other = Share(self._connection.live(share.rail), [], 0, -1)  # its bytes count for no rail
        self._post(other, places, deadline_s)

    def cancel(self) -> None:
        """End the transfer without a verdict on its rails. The caller destroys the queue pairs."""
        for share in [*self._failed, *(share for share, *_ in self._posted)]:
            self._rails.cancel(share)
        self._failed, self._posted = [], []

    def idle(self) -> bool:
        """Return True: the queue pairs are destroyed."""
        return True
