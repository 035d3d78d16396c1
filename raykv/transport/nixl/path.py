"""The data path over NIXL."""

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any, Final

from raykv.errors import CapacityError
from raykv.protocol import messages
from raykv.protocol.codec import expect
from raykv.protocol.placement import Member
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.data_path import PathEnvironment
from raykv.transport.forking import abandon, drop_after_fork
from raykv.transport.link import Link
from raykv.transport.nixl.agent import Agent, AgentTransfer
from raykv.transport.one_sided.base import Broken, Item
from raykv.transport.one_sided.path import OneSidedPath
from raykv.transport.one_sided.staging import Stages
from raykv.types import NodeId

log = logging.getLogger(__name__)


class RemoteMemory:
    """The memory of one incarnation of a node, as its agent describes it. `parts`: how many parts of it are known.

    Attributes:
        stale: Whether a read met a part that is not known. The next read asks for the new parts.
    """

    path: Final = "nixl"
    ends: Final = 1

    def __init__(self, agent: Agent, answer: messages.NixlConnected) -> None:
        """Raises Broken if the agent refuses."""
        self._agent, self.parts, self.stale = agent, answer.parts, False
        self.arena, self.records, self.record_keys = answer.arena, answer.records, (1,)
        self._peer = agent.learn(answer.metadata)

    def extend(self, answer: messages.NixlConnected) -> None:
        """Learn of new parts. Raises Broken if the agent refuses."""
        self.stale = False
        if answer.metadata:
            self._agent.learn(answer.metadata)
        self.parts = answer.parts

    def readable(self, keys: Sequence[int]) -> bool:
        """Return whether a chunk with this key can be read."""
        self.stale |= keys[0] > self.parts
        return 0 < keys[0] <= self.parts

    def moving(self, items: Sequence[Item]) -> AgentTransfer:
        """Prepare to read `items`."""
        return AgentTransfer(self._agent, self._peer, list(items))

    def forget(self) -> None:
        """Disconnect from the node."""
        self._agent.forget(self._peer)

    def close(self) -> None:
        """Do nothing: what is under way cannot be ended, see `AgentTransfer.idle`."""


class NixlPath(OneSidedPath):
    """Reads over an agent of NIXL. Requests and the agents' metadata go over the links of the pool."""

    name = "nixl"

    def __init__(self, environment: PathEnvironment) -> None:
        """Start an agent. Raises ConfigError or CapacityError if it does not start."""
        super().__init__(environment)
        self._agent: Agent | None = Agent(environment.nixl)
        self._stages = Stages([self._agent])
        self._memories: dict[tuple[NodeId, int], RemoteMemory] = {}
        self._lock = threading.Lock()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Leave the agent to the parent. The child reads over other paths: NIXL does not survive a fork."""
        abandon((self._agent, self._stages, self._memories))
        self._agent, self._memories, self._lock = None, {}, threading.Lock()

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        usable = self._agent is not None and "nixl" in member.endpoints and bool(member.address)
        return usable and not self._avoided(member)

    def _reading(self, link: Link, member: Member, deadline_s: float) -> tuple[RemoteMemory, Stages]:
        agent, life = self._agent, (member.node_id, member.incarnation)
        if agent is None:
            raise Broken("a forked child does not use NIXL")
        memory = self._memories.get(life)
        if memory is None or memory.stale:
            known = 0 if memory is None else memory.parts
            request = messages.ConnectNixl(known)
            answer = expect(messages.NixlConnected, link.call(request, deadline_s=deadline_s))
            with self._lock:
                memory = self._memories.get(life)
                if memory is None:
                    if known:
                        raise Broken("the connection to the node has just been lost")
                    memory = self._memories[life] = RemoteMemory(agent, answer)
                elif answer.parts > memory.parts:
                    memory.extend(answer)
        return memory, self._stages

    def _avoid(self, member: Member, reason: str) -> None:
        super()._avoid(member, reason)
        with self._lock:
            memory = self._memories.pop((member.node_id, member.incarnation), None)
        if memory is not None:
            memory.forget()

    def write(self, member: Member, write: BulkWrite, *, deadline_s: float) -> int:
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        return {"over_tcp": self._over_tcp()}

    def retain(self, members: Collection[Member]) -> None:
        super().retain(members)
        lives = {(member.node_id, member.incarnation) for member in members}
        with self._lock:
            gone = [self._memories.pop(life) for life in list(self._memories) if life not in lives]
        for memory in gone:
            memory.forget()

    def close(self) -> None:
        self._tcp.close()
        if self._agent is not None:
            self._stages.close()
            self._agent = None


def open_path(environment: PathEnvironment) -> NixlPath | None:
    """Open the path. Returns None if the agent does not start; the log says why.

    Raises:
        ConfigError: A backend that `environment` names does not exist.
    """
    try:
        return NixlPath(environment)
    except CapacityError as error:
        log.warning("other hosts are not read over NIXL: %s", error)
        return None
