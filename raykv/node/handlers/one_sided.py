"""Serves peers that read this node's memory one-sidedly, over RDMA or NIXL."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from raykv.config import NodeConfig, nixl_backends, rdma_devices
from raykv.node.handlers.nixl import NixlHandler
from raykv.node.handlers.rdma import RdmaHandler
from raykv.node.handlers.read import ReadHandler
from raykv.node.peers import Peers
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import messages
from raykv.storage.store import Store
from raykv.transport.base import Reply

AFTER_S: Final = 1.0
"""A node serves for this long before it opens devices and registers memory. This takes processor time, which the first
requests after a restart need."""


class OneSidedHandler:
    """Tells where chunks are, and runs what makes the node's memory readable for peers."""

    def __init__(
        self, config: NodeConfig, store: Store, lock: threading.Lock, reads: ReadHandler, peers: Peers, *, tls: bool
    ) -> None:
        """Take the node's parts. `tls`: whether the node uses TLS."""
        self._store, self._reads = store, reads
        self._rdma = RdmaHandler(store, lock, peers, rdma_devices(config.rdma, tls=tls))
        self._nixl = NixlHandler(store, lock, nixl_backends(config.nixl, tls=tls))
        self.table: HandlerTable = {messages.Find: self._find, **self._rdma.table, **self._nixl.table}

    def tasks(
        self, stopping: threading.Event, add_endpoint: Callable[[str, str], None]
    ) -> dict[str, Callable[[], None]]:
        """Return what must run on threads of its own until `stopping` is set and `wake` was called."""

        def later(run: Callable[[threading.Event, Callable[[str], None]], None], name: str) -> None:
            if not stopping.wait(AFTER_S):
                run(stopping, partial(add_endpoint, name))

        return {"rdma": partial(later, self._rdma.run, "rdma"), "nixl": partial(later, self._nixl.run, "nixl")}

    def _find(self, request: messages.Find, session: NodeSession) -> Reply:
        registered = self._nixl.exports() if request.nixl else session.require_queue_pairs()
        pinned, choices, numbers = self._reads.look(request)
        offsets = pinned.offsets * (pinned.rows >= 0)
        generations = self._store.table.columns.generation[pinned.rows]
        self._reads.end_pins(pinned.rows)
        return Reply(
            messages.Found(
                rows=pinned.rows.tobytes(),
                offsets=offsets.tobytes(),
                nbytes=pinned.nbytes.tobytes(),
                checksums=pinned.checksums.tobytes(),
                generations=generations.tobytes(),
                remote_keys=registered.remote_keys(offsets),
                choices=choices,
                places=numbers,
            )
        )

    def wake(self) -> None:
        """Let the tasks look at `stopping`."""
        self._rdma.wake()
        self._nixl.wake()

    def close(self) -> None:
        """End the registrations. The server must have closed its connections before."""
        self._rdma.close()
        self._nixl.close()

    def stats(self) -> dict[str, dict[str, object]]:
        """Return the state of RDMA and NIXL."""
        return {"rdma": self._rdma.stats(), "nixl": self._nixl.stats()}
