"""An agent of NIXL: it registers memory of this process, and reads the registered memory of other agents."""

import logging
import time
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

import nixl

from raykv.errors import CapacityError, ConfigError
from raykv.transport.one_sided.base import Broken, Item, Late

log = logging.getLogger(__name__)

ERRORS: Final = tuple(
    each for each in vars(nixl._bindings).values() if isinstance(each, type) and issubclass(each, Exception)
)
"""All errors of NIXL. They have no base class of their own."""
_SYNC: Final = getattr(nixl._api, "nixl_thread_sync_t", nixl._bindings.nixl_thread_sync_t)
"""1.3.2 has two classes of this name, and its config takes that of `_api` only."""
SPIN_S: Final = 50e-6
NAP_S: Final = 100e-6
"""A wait polls for SPIN_S, then it sleeps for NAP_S between polls. NIXL releases the GIL while it posts and polls."""
REST_S: Final = 10.0
"""After a read has failed, its memory is not used again for this long: other parts of it may still be under way."""


class Registered:
    """Registered memory. NIXL needs no local key."""

    lkey = 1

    def __init__(self, agent: Any, address: int, nbytes: int) -> None:
        self._agent, self.place = agent, (address, nbytes, 0, "")
        self.descriptors = agent.get_reg_descs([self.place], "DRAM")
        try:
            agent.register_memory(self.descriptors)
        except ERRORS as error:
            raise CapacityError(f"NIXL cannot register {nbytes:,} bytes: {error}") from error

    def close(self) -> None:
        with suppress(*ERRORS):
            self._agent.deregister_memory(self.descriptors)


class Agent:
    """One agent. It has a progress thread, and no thread that listens for metadata. Thread-safe.

    All calls take NIXL's own lock: without it, the death of a peer crashes processes with NIXL 1.3.2.
    """

    def __init__(self, backends: tuple[str, ...]) -> None:
        """Start the agent.

        Raises:
            ConfigError: A backend is not there.
            CapacityError: It does not start.
        """
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
        config = nixl.nixl_agent_config(
            enable_prog_thread=True,
            enable_listen_thread=False,
            backends=list(backends),
            sync_mode=_SYNC.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self.nixl = nixl.nixl_agent(f"raykv-{uuid4().hex}", config)
        except ERRORS as error:
            raise CapacityError(f"NIXL does not start with {', '.join(backends)}: {error}") from error
        if lacking := sorted(set(backends) - set(self.nixl.backends)):
            there = ", ".join(self.nixl.get_plugin_list())
            raise ConfigError(f"field 'nixl': no backend {', '.join(lacking)} here; there are: {there}")

    def register(self, address: int, nbytes: int, *, remote: int = 0) -> Registered:
        """Register memory. Peers can do nothing without its metadata. Raises CapacityError."""
        return Registered(self.nixl, address, nbytes)

    def metadata_of(self, registered: list[Registered]) -> bytes:
        """Return what a peer needs in order to reach this agent and this memory. Raises CapacityError."""
        try:
            listed = self.nixl.get_reg_descs([each.place for each in registered], "DRAM")
            return bytes(self.nixl.get_partial_agent_metadata(listed, True, list(self.nixl.backends)))
        except ERRORS as error:
            raise CapacityError(f"NIXL gives no metadata: {error}") from error

    def learn(self, metadata: bytes) -> str:
        """Learn how to reach a peer's memory. Returns the peer's name. Raises Broken."""
        try:
            name = self.nixl.add_remote_agent(metadata)
        except ERRORS as error:
            raise Broken(f"NIXL refuses the peer: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Disconnect from a peer."""
        with suppress(*ERRORS):
            self.nixl.remove_remote_agent(name)


class AgentTransfer:
    """One batch of bytes that is read from a peer's memory."""

    def __init__(self, agent: Agent, peer: str, items: list[Item]) -> None:
        self._agent, self._peer, self._items = agent.nixl, peer, items
        self._handle: Any = None
        self._state = "PROC"
        self._failed_s: float | None = None

    def start(self, deadline_s: float) -> None:
        """Post the reads. Raises Broken."""
        agent = self._agent
        try:
            here = agent.get_xfer_descs([(item.local, item.nbytes, 0) for item in self._items], "DRAM")
            there = agent.get_xfer_descs([(item.remote, item.nbytes, 0) for item in self._items], "DRAM")
            self._handle = agent.initialize_xfer("READ", here, there, self._peer)
            self._state = agent.transfer(self._handle)
        except ERRORS as error:
            raise self._fail(str(error)) from error

    def wait(self, deadline_s: float) -> None:
        """Wait until all bytes are here. Raises Late at the deadline, and Broken."""
        spin_until_s = time.monotonic() + SPIN_S
        while self._poll() == "PROC":
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise Late("the deadline has passed before NIXL had read all bytes")
            if now_s >= spin_until_s:
                time.sleep(NAP_S)
        if self._state != "DONE":
            raise self._fail(self._state)
        self._release()

    def _poll(self) -> str:
        if self._state == "PROC" and self._handle is not None:
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except ERRORS as error:
                raise self._fail(str(error)) from error
        return self._state

    def _fail(self, reason: str) -> Broken:
        self._state, self._failed_s = "ERR", time.monotonic()
        return Broken(f"NIXL has failed: {reason}")

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(*ERRORS):
                handle.release()

    def cancel(self) -> None:
        """Do nothing: bytes may arrive even after the release of a handle, and after `forget`. See `idle`."""

    def idle(self) -> bool:
        """Return whether no byte can arrive any more: all have arrived, or the transfer failed REST_S ago."""
        if self._handle is None and self._failed_s is None:
            return True
        with suppress(Broken):
            self._poll()
        if self._state == "PROC" or (self._failed_s is not None and time.monotonic() < self._failed_s + REST_S):
            return False
        self._release()
        return True
