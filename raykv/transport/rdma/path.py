"""The data path over RDMA. What it cannot read goes over TCP, without the caller's help."""

import logging
import time
from collections.abc import Collection
from typing import Final
from weakref import WeakKeyDictionary

from raykv.errors import CapacityError, UsageError
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import ReadRun
from raykv.transport.data_path import DataPath, LinkPath, PathEnvironment
from raykv.transport.link import Link
from raykv.transport.rdma.device import Device, open_devices
from raykv.transport.rdma.queue_pair import Broken
from raykv.transport.rdma.remote_read import RemoteRead
from raykv.transport.rdma.staging import Stages
from raykv.transport.rdma.transfer import Connection, LocalRails
from raykv.types import NodeId

log = logging.getLogger(__name__)

FAIR_S: Final = 0.05
"""A read that misses its deadline counts against RDMA only if it had this much time and no chunk has arrived."""
RETRY_S: Final = 10.0
"""After RDMA to a node has failed, the node is read over TCP for this long."""


class RdmaPath(DataPath):
    """Reads over the RDMA devices of this host. Each link of the pool has its own queue pairs.

    Attributes:
        devices: The ports that are used.
    """

    name = "rdma"

    def __init__(self, environment: PathEnvironment) -> None:
        self._environment, self._tcp = environment, LinkPath(environment)
        self._verify = environment.verify != "never"
        self.devices: list[Device] = open_devices(environment.rdma or ())
        self._stages = Stages(self.devices)
        self._rails = LocalRails(self.devices) if self.devices else None
        self._connections: WeakKeyDictionary[Link, Connection] = WeakKeyDictionary()
        self._failed: dict[NodeId, tuple[float, str]] = {}  # until when a node is read over TCP, and why

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        if not self.devices or "rdma" not in member.endpoints or not member.address:
            return False
        return member.node_id not in self._failed or member.node_id not in self.fallbacks()

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
            connection = self._connection(link, deadline_s)
            assert self._rails is not None
            reading = RemoteRead(
                run, connection, self._stages, self._rails, verify=self._verify, threads=self._environment.threads
            )
            left = reading.read(link, deadline_s=deadline_s)
        except (Broken, CapacityError, UsageError) as error:
            now_s = time.monotonic()
            if now_s < deadline_s or (len(run.arrived) == before and deadline_s - began_s >= FAIR_S):
                log.warning("%s is read over TCP for %.0f s: %s", member.node_id, RETRY_S, error)
                self._failed[member.node_id] = now_s + RETRY_S, str(error)
            return run.missing
        return left

    def fallbacks(self) -> dict[NodeId, str]:
        now_s = time.monotonic()
        return {name: why for name, (until_s, why) in list(self._failed.items()) if now_s < until_s}

    def _connection(self, link: Link, deadline_s: float) -> Connection:
        """Return the queue pairs of a link. They are connected at the first call."""
        assert self._rails is not None
        found = self._connections.get(link)
        if found is not None and found.lacks(self._rails):
            found.close()
            found = None
        if found is None:
            found = self._connections[link] = Connection(link, self._rails, deadline_s=deadline_s)
        return found

    def _read_over_tcp(self, member: Member, run: ReadRun, places: list[int], deadline_s: float) -> None:
        """Read some chunks of a run over TCP, and add the outcome to that of the run."""
        rest = ReadRun(run.progress, run.holder, places, run.locate)
        try:
            self._tcp.read(member, rest, deadline_s=deadline_s)
        finally:
            run.over_tcp += rest.arrived
            run.arrived += rest.arrived
            run.gone += rest.gone
            run.corrupt += rest.corrupt
            run.other_size += rest.other_size
            run.named |= rest.named

    def retain(self, members: Collection[Member]) -> None:
        names = {member.node_id for member in members}
        self._failed = {name: failed for name, failed in list(self._failed.items()) if name in names}

    def close(self) -> None:
        """Close the devices. The pool must be closed before: its links have the queue pairs."""
        for connection in list(self._connections.values()):
            connection.close()
        self._stages.close()
        for device in self.devices:
            device.close()
