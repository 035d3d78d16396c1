"""The namespaces of one node: what the list of them (`raykv.membership.namespace_registry`) says, done to its store and its tiers."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError, UsageError
from raykv.eviction import policy
from raykv.membership.namespace_registry import Entry, Register
from raykv.memory.table import MAX_NAMESPACES
from raykv.metrics import NamespaceMetrics
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.tier.mover import Tiers

log = logging.getLogger(__name__)

MAX_WORD: Final = 32
"""Letters of a reason for a miss."""
DROP_STEP: Final = 8192
"""Chunks of a dropped namespace that go at once; then others get the lock."""


class Namespaces:
    """A node's copy of the list. Thread-safe.

    The copy outlives the process as long as chunks do, in a file beside the table and one beside those of the SSDs: who
    was away while a namespace was dropped knows by it that its chunks are to go.

    Attributes:
        register: The copy. Changed by `adopt` alone.
    """

    def __init__(self, store: Store, lock: threading.Lock, tiers: Tiers, paths: Sequence[Path]) -> None:
        """Do what this node knew before.

        Args:
            lock: The store's.
            paths: Where the list is kept, that beside the table first.
        """
        self._shard, self._lock, self._tiers, self._paths = store, lock, tiers, paths
        self._adopting = threading.Lock()
        self._tallies = NamespaceMetrics()
        self._went: dict[bytes, int] = {}
        self.register = Register()
        for path in paths:
            try:
                self.register.merge(Register.decode(path.read_bytes()))
            except FileNotFoundError:
                pass
            except (OSError, UsageError) as error:
                log.warning("the list of namespaces in %s is of no use, the directory will tell: %s", path, error)
        self.register.version = min(self.register.version, 1)  # it may be old: so the directory tells its own
        for entry in self.register.entries.values():
            self._configure(entry)

    def require(self, namespace: Namespace, fields: dict[str, Any]) -> None:
        """Refuse a config that this node could not follow, before the directory keeps it.

        Raises:
            UsageError, CapacityError: As `Register.configure`.
            ConfigError: There is no such policy here.
        """
        trial = Register(entries=dict(self.register.entries))
        trial.configure(namespace, fields, now_ns=0)
        wanted = trial.config(namespace.group.digest).policy
        if wanted is not None:
            policy(wanted)

    def adopt(self, text: bytes) -> None:
        """Do what a newer list says.

        Raises:
            UsageError: It is no such list.
        """
        told = Register.decode(text)
        with self._adopting:
            for entry in self.register.newer(told):
                before = self.register.entries.get(entry.namespace.digest)
                if entry.dropped_ns > (before.dropped_ns if before else 0):
                    self._went[entry.namespace.digest] = self._drop(entry.namespace)
                self._configure(entry)
                self.register.entries = {**self.register.entries, entry.namespace.digest: entry}
            self.register.forget()
            if told.version > self.register.version:
                self.register.version = told.version
            self._keep()  # last: whoever dies before drops again

    def went(self, digest: bytes) -> int:
        """Chunks that went when an quota group was dropped last, those of each tier counted."""
        return self._went.get(digest, 0)

    def list(self) -> dict[str, dict[str, Any]]:
        """What there is of each quota group, by its fields as JSON, as plain values. Looks at all rows."""
        store, room, columns = self._shard, self._shard.room, self._shard.table.columns
        ready = store.table.ready_rows()
        groups = columns.namespace[ready]
        chunks = np.bincount(groups, minlength=MAX_NAMESPACES)
        reads = np.bincount(groups, columns.frequency[ready], MAX_NAMESPACES).astype(np.int64) + room.reads_of_gone
        told = {}
        for number, text in store.table.texts().items():
            digest = Namespace.model_validate_json(text).digest
            went = room.departures[number].tolist()
            told[text.decode()] = {
                "config": self.register.config(digest).model_dump(mode="json", exclude_defaults=True),
                "policy": room.policies.name(number),
                "chunks": int(chunks[number]),
                "used_nbytes": int(room.used_nbytes[number]),
                "reads": int(reads[number]),
                "departures": {Reason(at).word: count for at, count in enumerate(went) if count},
                "below_nbytes": {tier.name: tier.used_nbytes(number) for tier in self._tiers.tiers},
                **self._tallies.told(digest),
            }
        return told

    def note(self, digest: bytes, misses: dict[str, int], gets: Sequence[int], puts: Sequence[int]) -> None:
        """What a client saw of an quota group. Ignored if we do not know the quota group, as far as it is impossible."""
        if self._shard.groups.find(digest) is not None:
            sane = {reason[:MAX_WORD]: count for reason, count in misses.items() if 0 < count < 1 << 48}
            if all(0 <= count < 1 << 48 for count in (*gets, *puts)):
                self._tallies.note(digest, sane, gets, puts)

    def _configure(self, entry: Entry) -> None:
        store, number = self._shard, None
        try:
            with self._lock:
                number = store.groups.find(entry.namespace.digest)
                if number is None and entry.listed:
                    number = store.groups.open(entry.namespace)
                if number is not None:
                    store.groups.retire(number, retired=not entry.listed)
                    store.configure(number, entry.config, now_s=time.monotonic())
        except RayKVError as error:
            log.error("namespace %s: %s", entry.namespace.model, error)
        if number is not None:
            self._tiers.set_quota(number, entry.config.ssd_quota_nbytes)

    def _drop(self, namespace: Namespace) -> int:
        store = self._shard
        with self._lock:
            number = store.groups.find(namespace.digest)
            if number is None and self._tiers:
                try:
                    number = store.groups.open(namespace)  # what lies below is known by the quota group's number
                except RayKVError as error:
                    log.error("a namespace cannot be dropped here: %s", error)
            if number is None:
                return 0
        with self._tiers.barring(group=number):
            with self._lock:
                rows, generations = store.doomed(number, now_s=time.monotonic())
            count = self._tiers.drop(number)
            for first in range(0, len(rows), DROP_STEP):
                with self._lock:
                    count += store.drop_doomed(rows[first : first + DROP_STEP], generations[first : first + DROP_STEP])
        return count

    def _keep(self) -> None:
        """Write the list, so that a reader finds the one before or this one whole."""
        text = self.register.encode()
        for path in self._paths:
            fresh = path.with_name(path.name + ".new")
            try:
                descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                fresh.replace(path)
            except OSError as error:
                log.warning("the list of namespaces cannot be kept in %s: %s", path, error)


def register_paths(config: NodeConfig) -> list[Path]:
    """Where a node keeps its list: wherever chunks of it outlive its process."""
    prefix, ssd = config.file_prefix, config.storage.ssd
    paths = [] if prefix is None else [prefix.with_name(prefix.name + ".namespaces")]
    if ssd is not None:
        paths.append(ssd.paths[0] / f"raykv-{config.cluster}-{config.node_id}.namespaces")
    return paths
