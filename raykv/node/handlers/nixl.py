"""Serves peers that use NIXL: registers the node's memory, and sends the metadata of the node's agent."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from raykv.errors import CapacityError, ConfigError, UsageError
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import messages
from raykv.storage.store import Store
from raykv.transport import nixl
from raykv.transport.base import Reply

if TYPE_CHECKING:
    from raykv.transport.nixl.exports import NixlExports

log = logging.getLogger(__name__)


class NixlHandler:
    """Tells peers how to reach the node's memory over NIXL.

    Attributes:
        reason: Why peers do not reach the node over NIXL; empty if they do.
    """

    def __init__(self, store: Store, lock: threading.Lock, backends: tuple[str, ...]) -> None:
        """Take the node's parts. `backends`: names of NIXL's backends; empty: no NIXL."""
        self._store, self._lock, self._backends = store, lock, backends
        self._exports: NixlExports | None = None
        self.reason = (nixl.missing() or "the agent has not started yet") if backends else "it is turned off"
        self.table: HandlerTable = {messages.ConnectNixl: self._connect}

    def run(self, stopping: threading.Event, on_open: Callable[[str], None]) -> None:
        """Start the agent, and register memory until the node stops. Returns at once without NIXL.

        Args:
            stopping: Set when the node stops. Then `wake` must be called.
            on_open: Called with the names of the backends when peers can connect.
        """
        if not self._backends or nixl.missing():
            return
        store = self._store
        try:
            from raykv.transport.nixl.agent import Agent
            from raykv.transport.nixl.exports import NixlExports

            exports = NixlExports(store.arena, store.table, Agent(self._backends))
        except (ImportError, ConfigError, CapacityError) as error:
            log.error("peers do not reach this node over NIXL: %s", error)
            self.reason = str(error)
            return
        with self._lock:
            store.populator.on_populated.append(exports.add)
            size = store.table.extent_nbytes
            for extent in np.flatnonzero(store.table.extent_slots).tolist():
                exports.add(extent * size, size)
            self._exports, self.reason = exports, ""
        log.info("peers can reach this node over NIXL: %s", ", ".join(self._backends))
        on_open(",".join(self._backends))
        exports.run(stopping)

    def exports(self) -> "NixlExports":
        """Return the registered memory. Raises UsageError if there is none."""
        if self._exports is None:
            raise UsageError(f"this node cannot be reached over NIXL: {self.reason}")
        return self._exports

    def wake(self) -> None:
        """Let `run` look at its `stopping` event."""
        if self._exports is not None:
            self._exports.wake()

    def close(self) -> None:
        """End the registrations."""
        if self._exports is not None:
            self._exports.close()

    def _connect(self, request: messages.ConnectNixl, session: NodeSession) -> Reply:
        return Reply(self.exports().connect(request.parts))

    def stats(self) -> dict[str, object]:
        """Return what is registered."""
        exports = self._exports
        if exports is None:
            return {"reason": self.reason}
        return {
            "backends": list(self._backends),
            "registered_nbytes": exports.registered_nbytes,
            "reason": exports.refused,
        }
