"""What data paths share that read one-sidedly. What they cannot read goes over TCP, without the caller's help."""

import logging
import time
from collections.abc import Collection
from typing import Final

from raykv.errors import CapacityError, UsageError
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import ReadRun
from raykv.transport.data_path import DataPath, LinkPath, PathEnvironment
from raykv.transport.link import Link
from raykv.transport.one_sided.base import Broken, Reading
from raykv.transport.one_sided.remote_read import RemoteRead
from raykv.transport.one_sided.staging import Stages
from raykv.types import NodeId, Path

log = logging.getLogger(__name__)

FAIR_S: Final = 0.05
"""A read that misses its deadline counts against the path only if it had this much time and no chunk has arrived."""
RETRY_S: Final = 10.0
"""After one-sided reads from a node have failed, its chunks go over TCP for this long."""


class OneSidedPath(DataPath):
    """Reads with the help of the nodes' addresses. Subclasses connect. Thread-safe."""

    name: Path

    def __init__(self, environment: PathEnvironment) -> None:
        self._environment, self._tcp = environment, LinkPath(environment)
        self._verify = environment.verify != "never"
        self._failed: dict[NodeId, tuple[float, str]] = {}  # until when a node's chunks go over TCP, and why

    def _reading(self, link: Link, member: Member, deadline_s: float) -> tuple[Reading, Stages]:
        """Return the way to a member's memory, and the memory of this process that it reads into.

        Raises:
            Broken, CapacityError, UsageError: There is no way; the chunks go over TCP.
        """
        raise NotImplementedError

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
        """Read one-sidedly. Returns the chunks to read over TCP.

        An error of the path is no error of the peer: its breaker stays closed, and TCP is tried at once.
        """
        began_s, before = time.monotonic(), len(run.arrived)
        try:
            reading, stages = self._reading(link, member, deadline_s)
            remote = RemoteRead(run, reading, stages, verify=self._verify, threads=self._environment.threads)
            left = remote.read(link, deadline_s=deadline_s)
        except (Broken, CapacityError, UsageError) as error:
            if time.monotonic() < deadline_s or (len(run.arrived) == before and deadline_s - began_s >= FAIR_S):
                self._avoid(member, str(error))
            run.begin(self.name)  # TCP finds out again what is not here
            return run.missing
        return left

    def _avoid(self, member: Member, reason: str) -> None:
        """Use TCP for a node for a while."""
        log.warning("chunks of %s go over TCP for %.0f s: %s", member.node_id, RETRY_S, reason)
        self._failed[member.node_id] = time.monotonic() + RETRY_S, reason

    def _avoided(self, member: Member) -> bool:
        """Return whether a member's chunks go over TCP."""
        return member.node_id in self._failed and member.node_id in self._over_tcp()

    def _over_tcp(self) -> dict[NodeId, str]:
        """Return the nodes whose chunks go over TCP, because the path to them has failed, and why."""
        now_s = time.monotonic()
        return {name: why for name, (until_s, why) in list(self._failed.items()) if now_s < until_s}

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
