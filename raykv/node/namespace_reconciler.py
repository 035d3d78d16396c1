"""Applies the cluster's list of namespaces (`raykv.membership.namespace_registry`) to one node's store and tiers.

The list has one entry for each quota group. A quota group is a namespace without its salt and adapter. Each group
has one config, one capacity and one set of counters.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError
from raykv.membership.namespace_registry import Entry, NamespaceRegistry
from raykv.memory.layout import MAX_NAMESPACES
from raykv.metrics import NamespaceMetrics
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Reason
from raykv.storage.small_files import read_file, replace_file
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.transport.server import LogLimit

log = logging.getLogger(__name__)

DROPPED_AT_ONCE: Final = 8192
"""A drop removes at most this many chunks at a time under the node's lock, because writers wait for the lock."""
MAX_FILE_NBYTES: Final = 64 << 20


class NamespaceReconciler:
    """Holds a node's copy of the list of namespaces, and applies it to the store and the tiers. Thread-safe.

    The copy is also stored in files, next to the chunks. After a restart, the node compares the stored copy with the
    directory's list, and drops the chunks of namespaces that were dropped while the node was down.

    Attributes:
        registry: The copy. Only `adopt` changes it.
    """

    def __init__(
        self, store: Store, lock: threading.Lock, mover: TierMover, paths: Sequence[Path], changed: Callable[[], None]
    ) -> None:
        """Load the list from the files and apply it. Invalid files are ignored.

        Args:
            paths: The files: see `registry_paths`.
            changed: Called at the end of each `adopt`, which may have dropped chunks or changed quotas.
        """
        self._store, self._lock, self._mover, self._paths, self._changed = store, lock, mover, paths, changed
        store.groups.has_tiers = bool(mover)
        self._adopting, self._log = threading.Lock(), LogLimit(log)
        self._metrics = NamespaceMetrics()
        self._served = np.zeros((MAX_NAMESPACES, 2), np.int64)  # for each quota group: requests served, bytes sent
        self._dropped: dict[bytes, int] = {}
        self.registry = NamespaceRegistry()
        for path in paths:
            self._load(path)
        self.registry.version = min(self.registry.version, 1)  # a version this low makes the directory send its list
        for entry in self.registry.entries.values():
            self._configure(entry)

    def adopt(self, text: bytes) -> None:
        """Apply the newer entries of an encoded list of namespaces. Raises UsageError if `text` is not such a list."""
        theirs = NamespaceRegistry.decode(text)
        with self._adopting:
            for entry in self.registry.newer(theirs):
                digest = entry.namespace.digest
                before = self.registry.entries.get(digest)
                if entry.dropped_ns > (before.dropped_ns if before else 0):
                    self._dropped[digest] = self._drop(entry.namespace)
                self._configure(entry)
                self.registry.entries = {**self.registry.entries, digest: entry}
            self.registry.trim()
            entries = self.registry.entries
            self._dropped = {digest: count for digest, count in self._dropped.items() if digest in entries}
            self.registry.version = max(self.registry.version, theirs.version)
            self._save()  # saved last, so that a node that dies before this line repeats the drops after its restart
        self._changed()

    def dropped_chunks(self, digest: bytes) -> int:
        """Return how many copies of chunks the last drop of this quota group removed, in memory and tiers."""
        return self._dropped.get(digest, 0)

    def list(self) -> dict[str, dict[str, Any]]:
        """Return the config and the counters of each quota group. This scans the whole chunk table.

        Each key of the result is the JSON text of one quota group's fields.
        """
        store, columns = self._store, self._store.table.columns
        evictor = store.evictor
        ready = store.table.ready_rows()
        groups = columns.group[ready]
        chunks = np.bincount(groups, minlength=MAX_NAMESPACES)
        reads = np.bincount(groups, columns.frequency[ready], MAX_NAMESPACES).astype(np.int64)
        reads += evictor.reads_of_departed
        found = {}
        for number, text in store.table.texts().items():
            digest = Namespace.model_validate_json(text).digest
            departures = evictor.departures[number].tolist()
            found[text.decode()] = {
                "config": self.registry.config(digest).model_dump(mode="json", exclude_defaults=True),
                "policy": evictor.policies.name(number),
                "chunks": int(chunks[number]),
                "used_nbytes": int(store.allocator.used_nbytes[number]),
                "reads": int(reads[number]),
                "departures": {Reason(at).word: count for at, count in enumerate(departures) if count},
                "below_nbytes": {tier.name: tier.used_nbytes(number) for tier in self._mover.tiers},
                "requests": int(self._served[number, 0]),
                "served_nbytes": int(self._served[number, 1]),
                **self._metrics.summary(digest),
            }
        return found

    def count_request(self, digest: bytes, nbytes: int) -> None:
        """Count one request of a quota group, and `nbytes` bytes of chunks in the answer.

        Concurrent calls may lose counts. Reads through shared memory are not counted, because they send no request.
        """
        number = self._store.groups.find(digest)
        if number is not None:
            self._served[number] += (1, nbytes)

    def add_report(self, digest: bytes, misses: dict[str, int], gets: Sequence[int], puts: Sequence[int]) -> None:
        """Add a client's counts to the metrics of a quota group. If the node does not know the group, do nothing."""
        if self._store.groups.find(digest) is not None:
            self._metrics.add_report(digest, misses, gets, puts)

    def _configure(self, entry: Entry) -> None:
        store, number = self._store, None
        try:
            with self._lock:
                number = store.groups.find(entry.namespace.digest)
                if number is None and entry.listed:
                    number = store.groups.open(entry.namespace)
                if number is not None:
                    store.groups.retire(number, retired=not entry.listed)
                    store.configure(number, entry.config, now_s=time.monotonic())
        except RayKVError as error:
            self._log.write(logging.ERROR, "namespace %.80s: %.300s", entry.namespace.model, error)
        if number is not None:
            self._mover.set_quota(number, entry.config.ssd_quota_nbytes)

    def _drop(self, namespace: Namespace) -> int:
        store = self._store
        with self._lock:
            number = store.groups.find(namespace.digest)
            if number is None and self._mover:
                try:
                    number = store.groups.open(namespace)  # the tiers need the group's number
                except RayKVError as error:
                    self._log.write(logging.ERROR, "namespace %.80s cannot be dropped: %.300s", namespace.model, error)
            if number is None:
                return 0
        self._served[number] = 0
        with self._mover.barring(group=number):
            with self._lock:
                rows, generations = store.rows_of(number)
            count = self._mover.drop(number)
            for first in range(0, len(rows), DROPPED_AT_ONCE):
                some = slice(first, first + DROPPED_AT_ONCE)
                with self._lock:
                    count += store.drop(rows[some], generations[some], now_s=time.monotonic())
        return count

    def _load(self, path: Path) -> None:
        try:
            text = read_file(path, most_nbytes=MAX_FILE_NBYTES)
            if text is None:
                return
            registry = NamespaceRegistry.decode(text)
            registry.encode()  # a list that cannot be encoded fails here; otherwise the next heartbeat would fail
            self.registry.merge(registry)
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            log.warning("no list of namespaces in %s; the directory sends its own: %s", path, error)

    def _save(self) -> None:
        text = self.registry.encode()
        for path in self._paths:
            try:
                replace_file(path, text)
            except OSError as error:
                log.warning("the list of namespaces cannot be written to %s: %s", path, error)


def registry_paths(config: NodeConfig) -> list[Path]:
    """Return the files for a node's list of namespaces: next to the node's memory files, and on its first SSD path."""
    prefix, ssd = config.file_prefix, config.storage.ssd
    paths = [] if prefix is None else [prefix.with_name(prefix.name + ".namespaces")]
    if ssd is not None:
        paths.append(ssd.paths[0] / f"raykv-{config.cluster}-{config.node_id}.namespaces")
    return paths
