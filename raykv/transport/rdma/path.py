"""The data path over RDMA. What it cannot move goes over TCP, without the caller's help."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

from raykv.errors import CapacityError, UsageError
from raykv.protocol.placement import Member
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.data_path import PathEnvironment
from raykv.transport.forking import abandon, drop_after_fork
from raykv.transport.link import Link
from raykv.transport.one_sided.base import Broken
from raykv.transport.one_sided.path import OneSidedPath
from raykv.transport.one_sided.staging import Stages
from raykv.transport.rdma.device import Device, open_devices
from raykv.transport.rdma.exports import Exports
from raykv.transport.rdma.remote_write import RemoteWrite
from raykv.transport.rdma.transfer import Connection, LocalRails


class Opened:
    """The devices of this process, and what belongs to them. A forked child opens its own.

    Attributes:
        devices: The ports that are used.
        exports: The registered memory of this process's node, whose devices are used. None: this is no node.
    """

    def __init__(self, names: tuple[str, ...], exports: Exports | None = None) -> None:
        """Use the devices of `exports`. Without it, open those in `names`, or all if it is empty.

        Raises:
            ConfigError: A device in `names` does not exist.
        """
        self.exports = exports
        self.devices: list[Device] = open_devices(names) if exports is None else exports.devices
        self.stages = Stages(self.devices)
        self.rails = LocalRails(self.devices) if self.devices else None
        self.connections: WeakKeyDictionary[Link, Connection] = WeakKeyDictionary()

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()
        self.stages.close()
        for device in self.devices if self.exports is None else ():
            device.close()


class RdmaPath(OneSidedPath):
    """Reads and writes over the RDMA devices of this host. Each link of the pool has its own queue pairs."""

    name, writes = "rdma", True

    def __init__(self, environment: PathEnvironment, exports: Exports | None = None) -> None:
        """Open the devices, or use those of a node.

        Args:
            environment: The caller's links, and the names of the devices.
            exports: The registered memory of this process's node. It is closed after this path. None: this is no node.

        Raises:
            ConfigError: A device that `environment` names does not exist.
        """
        super().__init__(environment)
        self._opened: Opened | None = Opened(environment.rdma or (), exports)
        self._opening = threading.Lock()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Leave the devices to the parent: its pages are registered with them."""
        abandon(self._opened)
        self._opened, self._opening = None, threading.Lock()

    def _devices(self) -> Opened:
        """Return the devices of this process. A forked child opens them at the first call."""
        with self._opening:
            if self._opened is None:
                self._opened = Opened(self._environment.rdma or ())
            return self._opened

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        if "rdma" not in member.endpoints or not member.address or not self._devices().devices:
            return False
        return not self._avoided(member)

    def _reading(self, link: Link, member: Member, deadline_s: float) -> tuple[Connection, Stages]:
        opened = self._devices()
        assert opened.rails is not None
        return self._connection(link, opened, opened.rails, deadline_s), opened.stages

    def write(self, member: Member, write: BulkWrite, *, deadline_s: float) -> int:
        return self._environment.pool.ask(
            member.address, lambda link: self._write(link, member, write, deadline_s), deadline_s=deadline_s
        )

    def _write(self, link: Link, member: Member, write: BulkWrite, deadline_s: float) -> int:
        """Write over RDMA, and over TCP what RDMA cannot write. Returns how many chunks the node has stored."""
        try:
            opened = self._devices()
            assert opened.rails is not None
            connection = self._connection(link, opened, opened.rails, deadline_s)
        except (Broken, CapacityError, UsageError) as error:
            self._avoid(member, str(error))
            return write.send(link, deadline_s=deadline_s)
        placer = RemoteWrite(connection, opened.stages, opened.rails, opened.exports, threads=self._environment.threads)
        try:
            stored = write.send(link, placer, deadline_s=deadline_s)
        finally:
            if placer.failure:
                self._avoid(member, placer.failure)
        if stored < placer.placed:
            connection.close()  # the node destroys its ends if bytes were wrong
        return stored

    def stats(self) -> dict[str, Any]:
        rails = self._devices().rails
        return {"over_tcp": self._over_tcp(), "ports": {} if rails is None else rails.stats()}

    def _connection(self, link: Link, opened: Opened, rails: LocalRails, deadline_s: float) -> Connection:
        """Return the queue pairs of a link. They are connected at the first call."""
        found = opened.connections.get(link)
        if found is not None and found.lacks(rails):
            found.close()
            link.at_close.remove(found.close)
            found = None
        if found is None:
            found = opened.connections[link] = Connection(link, rails, deadline_s=deadline_s)
        return found

    def close(self) -> None:
        """Close the devices. The pool must be closed before: its links have the queue pairs."""
        self._tcp.close()
        if self._opened is not None:
            self._opened.close()
