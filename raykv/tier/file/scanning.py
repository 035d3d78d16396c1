"""Scans a pack directory: reads new files, notices removed files, makes space. See `raykv.tier.file.tier`.

Methods run on threads of the tier and wait for the file system.
"""

import threading
import time
from typing import Final

from raykv.tier.file.folder import Name
from raykv.tier.file.state import State
from raykv.tier.segments.format import living, raw_keys

STALE_S: Final = 24 * 3600.0
"""A part of another process is removed if nothing was written to it for this time."""


class Scanner:
    def __init__(self, state: State) -> None:
        self._state = state
        self._taken_over = False
        self._making_space = threading.Lock()
        self._obsolete: set[Name] = set()

    def scan(self) -> None:
        try:
            self._scan()
            with self._state.lock:
                self._state.next_scan_s = time.monotonic() + self._state.config.scan_s
        except OSError as error:
            self._state.fail(error, reading=True)

    def _scan(self) -> None:
        state, folder, began_s = self._state, self._state.folder, time.monotonic()
        folder.prepare()
        names = folder.names()
        parts = [name for name in names if name.kind == "part" and name.token != folder.token]
        if not self._taken_over:
            mine = [name for name in parts if name.writer == folder.writer]
            for name in mine:
                try:
                    folder.take_over(name)
                except OSError as error:
                    state.count_error(f"{name} stays as it is", error)
            names, self._taken_over = folder.names() if mine else names, True
        with state.lock:
            state.readable = not state.closed
            state.recover()
            new = [name for name in names if name.kind != "part" and name.stem not in state.catalog.known]
        # Tombstones first, then packs from newest to oldest. So no later file removes or replaces a chunk just entered.
        for name in sorted(new, key=lambda name: (name.kind == "tombs", name.sequence), reverse=True):
            if state.closed:
                return
            self._learn(name)
        self._remove_missing({name.stem for name in names}, began_s)
        try:
            for name in parts:
                status = folder.stat(name)
                if status is not None and time.time() - status.st_mtime > STALE_S:
                    folder.remove(name)
            self._remove_obsolete(names)
            self.make_space()
        except OSError as error:  # reads work without this clean-up
            state.count_error("not tidied", error)

    def _learn(self, name: Name) -> None:
        """Enter the content of a file into the catalog. If the file cannot be read now, the next scan retries it."""
        catalog = self._state.catalog
        try:
            record, nbytes = self._state.folder.record_of(name)
        except OSError as error:
            self._state.count_error(f"{name} cannot be read", error)
            return
        entries = None if record is None else living(record)
        with self._state.lock:
            pack = catalog.add_pack(name, nbytes)
            if record is not None and entries is not None:
                catalog.apply_tombstones(name.sequence, raw_keys(record.deleted["key"]), record.dropped_texts())
                catalog.insert(pack, record.texts, entries)

    def _remove_missing(self, there: set[str], began_s: float) -> None:
        """Drop removed files from the catalog. `there`: stems of the files in a listing that began at `began_s`.

        A listing may miss a file that is renamed meanwhile. So a file is dropped only if `stat` cannot find it either.
        """
        with self._state.lock:
            known = list(self._state.catalog.known.values())
        for pack in known:
            if pack.name.stem not in there and pack.known_s < began_s and self._state.folder.stat(pack.name) is None:
                with self._state.lock:
                    self._state.catalog.remove_pack(pack)

    def _remove_obsolete(self, names: list[Name]) -> None:
        """Remove the tombstone files that were older than all packs in this scan and in the previous scan.

        One scan is not enough, because it may miss a pack that is being renamed.
        """
        oldest = min((name.sequence for name in names if name.kind != "tombs"), default=time.time_ns())
        obsolete = {name for name in names if name.kind == "tombs" and name.sequence < oldest}
        for name in obsolete & self._obsolete:
            self._state.folder.remove(name)
        self._obsolete = obsolete

    def make_space(self) -> None:
        """Remove the least recently used packs until there is space for one more pack of this node."""
        state, folder = self._state, self._state.folder
        with self._making_space:
            own_part = ("part", folder.token)
            names = [name for name in folder.names() if name.kind != "tombs" and (name.kind, name.token) != own_part]
            sizes = {name: self._size(name) for name in names}
            excess = sum(sizes.values()) + state.config.pack_nbytes - state.config.capacity_nbytes
            if excess <= 0:
                return
            status = {name: folder.stat(name) for name in names if name.kind == "pack"}
            order = sorted((found.st_mtime_ns, name) for name, found in status.items() if found is not None)
            excess -= sum(sizes[name] for name, found in status.items() if found is None)
            for used_ns, name in order:
                found = folder.stat(name)
                if found is not None and found.st_mtime_ns != used_ns:
                    continue  # a node has read this pack since the first `stat`
                if excess <= 0:
                    return
                if found is not None:
                    folder.remove(name)
                excess -= sizes[name]
                with state.lock:
                    state.packs_removed += found is not None
                    if (pack := state.catalog.known.get(name.stem)) is not None:
                        state.catalog.remove_pack(pack)

    def _size(self, name: Name) -> int:
        with self._state.lock:
            pack = self._state.catalog.known.get(name.stem)
        if pack is not None:
            return pack.nbytes
        status = self._state.folder.stat(name)
        return 0 if status is None else 512 * status.st_blocks
