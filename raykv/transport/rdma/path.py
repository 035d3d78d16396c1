"""The data path over RDMA. What it cannot move goes over TCP, without the caller's help."""

import logging
import threading
import time
from collections.abc import Collection
from typing import Any, Final
from weakref import WeakKeyDictionary

from raykv.errors import CapacityError, UsageError
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import ReadRun
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.data_path import DataPath, LinkPath, PathEnvironment
from raykv.transport.forking import abandon, drop_after_fork
from raykv.transport.link import Link
from raykv.transport.rdma.device import Device, open_devices
from raykv.transport.rdma.exports import Exports
from raykv.transport.rdma.queue_pair import Broken
from raykv.transport.rdma.remote_read import RemoteRead
from raykv.transport.rdma.remote_write import RemoteWrite
from raykv.transport.rdma.staging import Stages
from raykv.transport.rdma.transfer import Connection, LocalRails
from raykv.types import NodeId

log = logging.getLogger(__name__)

FAIR_S: Final = 0.05
"""A read that misses its deadline counts against RDMA only if it had this much time and no chunk has arrived."""
RETRY_S: Final = 10.0
"""After RDMA to a node has failed, its chunks go over TCP for this long."""


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


class RdmaPath(DataPath):
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
        self._environment, self._tcp = environment, LinkPath(environment)
        self._verify = environment.verify != "never"
        self._opened: Opened | None = Opened(environment.rdma or (), exports)
        self._failed: dict[NodeId, tuple[float, str]] = {}  # until when a node's chunks go over TCP, and why
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
        return member.node_id not in self._failed or member.node_id not in self._over_tcp()

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        before = len(run.arrived)
        left = self._environment.pool.ask(
            member.address,
            lambda link: self._read(link, member, run, deadline_s),
            deadline_s=deadline_s,
            arrived_nbytes=lambda: run.progress.nbytes(run.arrived[before:]),
        )
        if left:
            self._read_over_tcp(member, run, left, deadline_s)

    def _read(self, link: Link, member: Member, run: ReadRun, deadline_s: float) -> list[int]:
        """Read over RDMA. Returns the chunks to read over TCP.

        An error of RDMA is no error of the peer: its breaker stays closed, and TCP is tried at once.
        """
        began_s, before = time.monotonic(), len(run.arrived)
        try:
            opened, threads = self._devices(), self._environment.threads
            assert opened.rails is not None
            connection = self._connection(link, opened, opened.rails, deadline_s)
            reading = RemoteRead(run, connection, opened.stages, opened.rails, verify=self._verify, threads=threads)
            left = reading.read(link, deadline_s=deadline_s)
        except (Broken, CapacityError, UsageError) as error:
            if time.monotonic() < deadline_s or (len(run.arrived) == before and deadline_s - began_s >= FAIR_S):
                self._avoid(member, str(error))
            run.begin("rdma")  # TCP finds out again what is not here
            return run.missing
        return left

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

    def _avoid(self, member: Member, reason: str) -> None:
        """Use TCP for a node for a while."""
        log.warning("chunks of %s go over TCP for %.0f s: %s", member.node_id, RETRY_S, reason)
        self._failed[member.node_id] = time.monotonic() + RETRY_S, reason

    def stats(self) -> dict[str, Any]:
        rails = self._devices().rails
        return {"over_tcp": self._over_tcp(), "ports": {} if rails is None else rails.stats()}

    def _over_tcp(self) -> dict[NodeId, str]:
        """Return the nodes whose chunks go over TCP, because RDMA to them has failed, and why."""
        now_s = time.monotonic()
        return {name: why for name, (until_s, why) in list(self._failed.items()) if now_s < until_s}

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

    def _read_over_tcp(self, member: Member, run: ReadRun, places: list[int], deadline_s: float) -> None:
        """Read some chunks of a run over TCP, and add the outcome to that of the run."""
        rest = ReadRun(run.progress, run.holder, places, run.locate)
        try:
            self._tcp.read(member, rest, deadline_s=deadline_s)
        finally:
            run.over_tcp += rest.arrived
            run.merge(rest)

    def retain(self, members: Collection[Member]) -> None:
        self._tcp.retain(members)
        names = {member.node_id for member in members}
        self._failed = {name: failed for name, failed in list(self._failed.items()) if name in names}

    def close(self) -> None:
        """Close the devices. The pool must be closed before: its links have the queue pairs."""
        self._tcp.close()
        if self._opened is not None:
            self._opened.close()
