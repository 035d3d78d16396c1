"""The namespaces that somebody configured or dropped: a list that the directory keeps, and every node copies. Pure.

Whoever is told of another copy takes from it what is newer, entry by entry. So it does no harm if the directory is
reborn with empty hands, or a node was away while a namespace was dropped.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import msgspec
from pydantic import ValidationError

from raykv.config import NamespaceConfig
from raykv.errors import CapacityError, RayKVError, UsageError
from raykv.protocol.namespace import Namespace

MAX_ENTRIES: Final = 1024
"""Namespaces with a config. As many more that were dropped are remembered, so that a node that was away drops them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is wanted for one quota group.

    Attributes:
        namespace: The quota group.
        config: Its config.
        changed_ns: When it was configured or dropped last, in nanoseconds since 1970.
        dropped_ns: When it was dropped last; 0 for never. Chunks from before that are to go.
        listed: Whether it was configured since.
    """

    namespace: Namespace
    config: NamespaceConfig
    changed_ns: int
    dropped_ns: int = 0
    listed: bool = True


@dataclass(slots=True)
class Register:
    """The list.

    Attributes:
        version: Grows with every change of the directory's copy; others have the version that they took from it.
        entries: By the digest of the quota group.
    """

    version: int = 0
    entries: dict[bytes, Entry] = field(default_factory=dict)

    def config(self, digest: bytes) -> NamespaceConfig:
        """Of an quota group; the default if nobody configured it."""
        entry = self.entries.get(digest)
        return NamespaceConfig() if entry is None else entry.config

    def configure(self, namespace: Namespace, fields: dict[str, Any], *, now_ns: int) -> None:
        """Change some fields of the config of a namespace's quota group; the others stay as they are.

        Raises:
            ConfigError: A field is wrong or unknown.
            UsageError: The chunk size is not that of the namespace.
            CapacityError: There are MAX_ENTRIES namespaces with a config.
        """
        group = namespace.group
        config = NamespaceConfig.load({**self.config(group.digest).model_dump(), **fields})
        if config.chunk_tokens not in (None, group.chunk_tokens):
            raise UsageError(
                f"field 'chunk_tokens': {config.chunk_tokens}, but chunks of this namespace have {group.chunk_tokens}"
                " tokens; keys depend on it, so use another namespace: with_fields(chunk_tokens=...)"
            )
        before = self.entries.get(group.digest)
        if (before is None or not before.listed) and sum(each.listed for each in self.entries.values()) >= MAX_ENTRIES:
            raise CapacityError(f"{MAX_ENTRIES} namespaces have a config; drop one")
        self._set(Entry(group, config, now_ns, before.dropped_ns if before else 0))

    def drop(self, namespace: Namespace, *, now_ns: int) -> None:
        """All chunks of the namespace's quota group are to go, and its config."""
        self._set(Entry(namespace.group, NamespaceConfig(), now_ns, now_ns, listed=False))
        self.forget()

    def forget(self) -> None:
        """Of the namespaces that were dropped, remember the last MAX_ENTRIES."""
        gone = self._dropped()
        if len(gone) > MAX_ENTRIES:
            old = {digest for _, digest in gone[:-MAX_ENTRIES]}
            self.entries = {digest: each for digest, each in self.entries.items() if digest not in old}

    def _dropped(self) -> list[tuple[int, bytes]]:
        """When they were, and which; the first one first."""
        return sorted((each.changed_ns, digest) for digest, each in self.entries.items() if not each.listed)

    def _set(self, entry: Entry) -> None:
        before = self.entries.get(entry.namespace.digest)
        if before is not None and entry.changed_ns <= before.changed_ns:  # clocks may go back
            newer_ns = before.changed_ns + 1
            entry = replace(entry, changed_ns=newer_ns, dropped_ns=entry.dropped_ns if entry.listed else newer_ns)
        self.entries[entry.namespace.digest] = entry
        self.version += 1

    def newer(self, other: "Register") -> list[Entry]:
        """What to take from another copy, as it is to be here."""
        found = []
        gone = self._dropped()
        forgotten = gone[-MAX_ENTRIES] if len(gone) >= MAX_ENTRIES else None
        for digest, theirs in other.entries.items():
            mine = self.entries.get(digest)
            if mine is None:
                if theirs.listed or forgotten is None or (theirs.changed_ns, digest) > forgotten:
                    found.append(theirs)
            elif theirs.changed_ns > mine.changed_ns or theirs.dropped_ns > mine.dropped_ns:
                latest = theirs if theirs.changed_ns > mine.changed_ns else mine
                found.append(replace(latest, dropped_ns=max(mine.dropped_ns, theirs.dropped_ns)))
        return found

    def merge(self, other: "Register") -> None:
        """The directory's copy takes in a node's; the version grows if theirs lacks anything now."""
        for entry in self.newer(other):
            self.entries[entry.namespace.digest] = entry
        self.forget()
        lacking = any(other.entries.get(digest) != entry for digest, entry in self.entries.items())
        self.version = max(self.version, other.version) + lacking

    def encode(self) -> bytes:
        """As JSON."""
        entries = [
            {
                "namespace": entry.namespace.model_dump(mode="json", exclude_defaults=True),
                "config": entry.config.model_dump(mode="json", exclude_defaults=True),
                "changed_ns": entry.changed_ns,
                "dropped_ns": entry.dropped_ns,
                "listed": entry.listed,
            }
            for entry in self.entries.values()
        ]
        return msgspec.json.encode({"version": self.version, "entries": entries})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Read what `encode` wrote.

        Raises:
            UsageError: It is not that.
        """
        try:
            raw = msgspec.json.decode(text, type=_Written)
            entries = [
                Entry(
                    Namespace.load(each.namespace),
                    NamespaceConfig.load(each.config),
                    each.changed_ns,
                    each.dropped_ns,
                    each.listed,
                )
                for each in raw.entries
            ]
        except (msgspec.MsgspecError, ValidationError, RayKVError) as error:
            raise UsageError(f"no list of namespaces: {error}") from error
        if len(entries) > 2 * MAX_ENTRIES:
            raise UsageError(f"a list of {len(entries)} namespaces; at most {2 * MAX_ENTRIES} are taken")
        return cls(raw.version, {entry.namespace.digest: entry for entry in entries})


class _WrittenEntry(msgspec.Struct):
    namespace: dict[str, Any]
    config: dict[str, Any]
    changed_ns: int
    dropped_ns: int
    listed: bool


class _Written(msgspec.Struct):
    version: int
    entries: list[_WrittenEntry]
