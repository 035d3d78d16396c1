"""The list of namespaces that were configured or dropped. The directory holds it, and every node has a copy.

The list is a last-writer-wins map with a version. Copies may differ after a node or the directory was unreachable or
lost its copy. A merge makes the copies equal again.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import msgspec

from raykv.config import Model, NamespaceConfig
from raykv.errors import CapacityError, UsageError
from raykv.memory.layout import NAMESPACE_TEXT_NBYTES
from raykv.protocol.namespace import Namespace

MAX_ENTRIES: Final = 1024
"""The list has at most this many configured namespaces, and refuses further ones. The list also has at most this many
dropped namespaces, so that unreachable nodes learn of the drops later. The oldest drop is removed first."""

LARGEST: Final = 1 << 62
"""Larger numbers in a received list are cut to this. No honest list has them, and a message could not carry them on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one quota group.

    Attributes:
        namespace: The quota group.
        config: The config of the group.
        changed_ns: Time of the last change, in nanoseconds since 1970. If two copies of the list have different entries
            for the group, the later change wins.
        dropped_ns: Time of the last drop; 0 means never. A node that learns of a later drop deletes the group's chunks.
    """

    namespace: Namespace
    config: NamespaceConfig
    changed_ns: int
    dropped_ns: int = 0

    @property
    def listed(self) -> bool:
        """Whether the quota group was configured after its last drop."""
        return self.changed_ns > self.dropped_ns


@dataclass(slots=True)
class NamespaceRegistry:
    """One copy of the list of namespaces.

    Attributes:
        version: Every change of the directory's copy increases this number. A node's copy has the number that the node
            last received from the directory.
        entries: Maps the digest of each quota group to its entry.
    """

    version: int = 0
    entries: dict[bytes, Entry] = field(default_factory=dict)

    def config(self, digest: bytes) -> NamespaceConfig:
        """Return the config of a quota group, or the default config if the list has none."""
        entry = self.entries.get(digest)
        return NamespaceConfig() if entry is None else entry.config

    def configure(self, namespace: Namespace, fields: dict[str, Any], *, now_ns: int) -> None:
        """Set the values in `fields` in the config of a namespace's quota group. Other config fields stay unchanged.

        Raises:
            ConfigError: A field is wrong or unknown.
            UsageError: The namespace's fields are too long.
            CapacityError: MAX_ENTRIES other namespaces have a config already.
        """
        group = namespace.group
        config = NamespaceConfig.load({**self.config(group.digest).model_dump(), **fields})
        before = self.entries.get(group.digest)
        if (before is None or not before.listed) and sum(each.listed for each in self.entries.values()) >= MAX_ENTRIES:
            raise CapacityError(f"{MAX_ENTRIES} namespaces have a config; drop one")
        self._set(group, config, now_ns)

    def drop(self, namespace: Namespace, *, now_ns: int) -> None:
        """Reset the config of the namespace's quota group, and record that nodes must delete the group's chunks.

        Raises UsageError if the namespace's fields are too long.
        """
        self._set(namespace.group, NamespaceConfig(), now_ns, drop=True)
        self.trim()

    def trim(self) -> None:
        """Remove the oldest dropped namespaces from the list if there are more than MAX_ENTRIES."""
        dropped = self._dropped()
        if len(dropped) > MAX_ENTRIES:
            old = {digest for _, digest in dropped[:-MAX_ENTRIES]}
            self.entries = {digest: each for digest, each in self.entries.items() if digest not in old}

    def _dropped(self) -> list[tuple[int, bytes]]:
        """Return (time of the drop, digest) for each dropped namespace, oldest first."""
        return sorted((each.changed_ns, digest) for digest, each in self.entries.items() if not each.listed)

    def _set(self, group: Namespace, config: NamespaceConfig, now_ns: int, *, drop: bool = False) -> None:
        _require_short(group)
        before = self.entries.get(group.digest)
        dropped_ns = 0
        if before is not None:
            dropped_ns, now_ns = before.dropped_ns, max(now_ns, before.changed_ns + 1)  # clocks may go back
        self.entries[group.digest] = Entry(group, config, now_ns, now_ns if drop else dropped_ns)
        self.version += 1

    def newer(self, other: "NamespaceRegistry") -> list[Entry]:
        """Return the entries that this copy must take over from another copy."""
        found = []
        dropped = self._dropped()
        trimmed = dropped[-MAX_ENTRIES] if len(dropped) >= MAX_ENTRIES else None  # `trim` removes drops older than this
        for digest, theirs in other.entries.items():
            mine = self.entries.get(digest)
            if mine is None:
                if theirs.listed or trimmed is None or (theirs.changed_ns, digest) > trimmed:
                    found.append(theirs)
            elif theirs.changed_ns > mine.changed_ns or theirs.dropped_ns > mine.dropped_ns:
                latest = theirs if theirs.changed_ns > mine.changed_ns else mine
                found.append(replace(latest, dropped_ns=max(mine.dropped_ns, theirs.dropped_ns)))
        return found

    def merge(self, other: "NamespaceRegistry") -> None:
        """Merge a node's copy into this copy.

        If the merged list has an entry that the node's copy lacks, this copy gets a higher version than the node's
        copy. Then the directory sends the merged list to the node.
        """
        for entry in self.newer(other):
            self.entries[entry.namespace.digest] = entry
        self.trim()
        lacking = any(other.entries.get(digest) != entry for digest, entry in self.entries.items())
        self.version = max(self.version, other.version) + lacking

    def encode(self) -> bytes:
        """Return the list as JSON text."""
        return msgspec.json.encode(_Encoded(self.version, list(self.entries.values())), enc_hook=_fields_of)

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Decode the output of `encode`. Raises UsageError for any other text, and for a list that is too long."""
        try:
            found = msgspec.json.decode(text, type=_Encoded, dec_hook=_load)
            entries = {entry.namespace.digest: _cut(entry) for entry in found.entries}
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: the text is not UTF-8
            raise UsageError(f"not a list of namespaces: {error}") from error
        if len(entries) > 2 * MAX_ENTRIES:
            raise UsageError(f"a list of {len(entries)} namespaces; at most {2 * MAX_ENTRIES} are accepted")
        for entry in entries.values():
            _require_short(entry.namespace)
        return cls(min(found.version, LARGEST), entries)


class _Encoded(msgspec.Struct):
    version: int
    entries: list[Entry]


def _require_short(namespace: Namespace) -> None:
    """Raise UsageError if no node could open this namespace, so that the size of a list is bounded."""
    nbytes = len(namespace.model_dump_json(exclude_defaults=True).encode())
    if nbytes > NAMESPACE_TEXT_NBYTES:
        raise UsageError(f"namespace of {nbytes} bytes as JSON, at most {NAMESPACE_TEXT_NBYTES}: shorten a field")


def _cut(entry: Entry) -> Entry:
    if max(entry.changed_ns, entry.dropped_ns) <= LARGEST:
        return entry
    return replace(entry, changed_ns=min(entry.changed_ns, LARGEST), dropped_ns=min(entry.dropped_ns, LARGEST))


def _fields_of(model: Model) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)


def _load(kind: type[Model], fields: Any) -> Model:
    return kind.load(msgspec.convert(fields, dict[str, Any]))
