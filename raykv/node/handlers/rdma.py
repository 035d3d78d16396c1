"""Serves peers that use RDMA: connects their queue pairs, and registers the node's memory for them."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from raykv.errors import ConfigError, UsageError
from raykv.node.peers import Peers
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import messages
from raykv.storage.store import Store
from raykv.transport import rdma
from raykv.transport.base import Reply

if TYPE_CHECKING:
    from raykv.transport.rdma.exports import Exports

log = logging.getLogger(__name__)


class RdmaHandler:
    """Connects queue pairs of peers.

    Attributes:
        reason: Why peers do not reach the node over RDMA; empty if they do.
    """

    def __init__(
        self,
        store: Store,
        lock: threading.Lock,
        peers: Peers,
        devices: tuple[str, ...] | None,
    ) -> None:
        """Take the node's parts. `devices`: names of the devices to use; empty for all. None: no RDMA."""
        self._store, self._lock, self._peers, self._devices = store, lock, peers, devices
        self._exports: Exports | None = None
        self.reason = "it is turned off" if devices is None else rdma.missing() or "the devices are not open yet"
        self.table: HandlerTable = {messages.ConnectRdma: self._connect}

    def run(self, stopping: threading.Event, on_open: Callable[[str], None]) -> None:
        """Open the devices, and register memory until the node stops. Returns at once if there is no device.

        This takes long. So the node serves already, and peers use TCP.

        Args:
            stopping: Set when the node stops. Then `wake` must be called.
            on_open: Called with the addresses of the devices when peers can connect.
        """
        if self._devices is None or rdma.missing():
            return
        store = self._store
        try:
            from raykv.transport.rdma.exports import Exports
            from raykv.transport.rdma.path import RdmaPath

            exports = Exports.open(store.arena, store.table, self._devices)
        except (ImportError, ConfigError) as error:  # pyverbs does not match libibverbs, or a device is not there
            log.error("peers reach this node over TCP only: %s", error)
            self.reason = str(error)
            return
        if exports is None:
            self.reason = "no device can be used; see the node's log"
            return
        with self._lock:
            store.populator.on_populated.append(exports.add)
            size = store.table.extent_nbytes
            for extent in np.flatnonzero(store.table.extent_slots).tolist():
                exports.add(extent * size, size)
            self._exports, self.reason = exports, ""
        log.info("peers can reach this node over RDMA: %s", exports.devices)
        self._peers.prefer(RdmaPath(self._peers.environment, exports))
        on_open(",".join(device.gid for device in exports.devices))
        exports.run(stopping)

    def wake(self) -> None:
        """Let `run` look at its `stopping` event."""
        if self._exports is not None:
            self._exports.wake()

    def close(self) -> None:
        """End the registrations. The server must have closed its connections before."""
        if self._exports is not None:
            self._exports.close()

    def _connect(self, request: messages.ConnectRdma, session: NodeSession) -> Reply:
        if self._exports is None:
            raise UsageError(f"this node cannot be reached over RDMA: {self.reason}")
        if session.queue_pairs is not None:  # the peer connects again, because a rail of it is back
            session.queue_pairs.close()
        session.queue_pairs, answer = self._exports.connect(request.ends)
        return Reply(answer)

    def stats(self) -> dict[str, object]:
        """Return the devices, what is registered, and what peers have written."""
        exports = self._exports
        if exports is None:
            return {"reason": self.reason}
        return {
            "devices": [f"{device.name}:{device.port}" for device in exports.devices],
            "registered_nbytes": exports.registered_nbytes,
            "queue_pairs": exports.open_pairs,
            "received": exports.received,
            "received_nbytes": exports.received_nbytes,
            "reason": exports.refused,
        }
