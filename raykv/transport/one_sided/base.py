"""The seam between one-sided reads and what carries them out: queue pairs, or an agent of NIXL."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from raykv.errors import PeerUnavailable
from raykv.types import Path


class Broken(PeerUnavailable):
    """The way to the peer's memory cannot be used any more. The connection for messages may still work."""


class Late(Broken):
    """The deadline has passed before a request was done. This says nothing about the way."""


class Registration(Protocol):
    """Registered memory. `lkey`: its local key, if there is such a thing."""

    @property
    def lkey(self) -> int: ...

    def close(self) -> None: ...


class Registrar(Protocol):
    """Registers memory of this process: a device, or an agent."""

    def register(self, address: int, nbytes: int, *, remote: int) -> Registration:
        """Register memory that has real pages. `remote`: what peers may do with it. Raises CapacityError."""
        ...


class Item(NamedTuple):
    """Bytes to move between two addresses.

    Attributes:
        local, lkeys: Address here, and the local key of its registration for each rail.
        remote, rkeys: Address at the peer, and the key of its registration for each of the ends.
        nbytes: Number of bytes.
    """

    local: int
    lkeys: Sequence[int]
    remote: int
    rkeys: Sequence[int]
    nbytes: int


class Moving(Protocol):
    """One batch of bytes that is read."""

    def start(self, deadline_s: float) -> None:
        """Post the requests. Raises Broken."""
        ...

    def wait(self, deadline_s: float) -> None:
        """Wait until all bytes are here. Raises Late at the deadline, and Broken."""
        ...

    def cancel(self) -> None:
        """End the batch after an error. The connection is closed already."""
        ...

    def idle(self) -> bool:
        """Return whether no byte of the cancelled batch can arrive any more. Memory is used again only then."""
        ...


class Reading(Protocol):
    """A way to read the memory of one peer.

    Attributes:
        path: Name of the data path.
        ends: Number of keys that the peer sends for each chunk.
        arena, records: Addresses of the arena and of the table's records in the peer's process.
        record_keys: For each of the `ends`, the key of the registration of the records.
    """

    @property
    def path(self) -> Path: ...

    @property
    def ends(self) -> int: ...

    @property
    def arena(self) -> int: ...

    @property
    def records(self) -> int: ...

    @property
    def record_keys(self) -> tuple[int, ...]: ...

    def readable(self, keys: Sequence[int]) -> bool:
        """Return whether a chunk with these keys of its registration can be read."""
        ...

    def moving(self, items: Sequence[Item]) -> Moving:
        """Prepare to read `items`."""
        ...

    def close(self) -> None:
        """End what is under way, if that is possible."""
        ...
