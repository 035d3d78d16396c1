"""Hostile values: whole messages of valid types whose fields hold numbers, lengths and texts that no honest peer sends.

All choices come from bytes, so a fuzzer can steer them, and random bytes give a random message.
"""

import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

from msgspec import inspect

from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.protocol import messages
from tests.support.nodes import SPACE, keys_of, names

T = TypeVar("T")

INTEGERS = [
    0, 1, 2, 3, 7, -1, -2, 100, 255, 4095, 4096, 4097, 50_000, 65_536, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
]  # fmt: skip
FLOATS = [0.0, 1.0, 0.5, -1.0, 60.0, 1e-9, 5e-324, 1e12, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "n", "node-0", "evicted", "UsageError", "x" * 33, "x" * 65, "\0", "ä\ud7ff", "../../etc", "\u2028"]
CHUNKS = names(40)
OTHER_SPACE = SPACE.with_fields(model="other")
JSON_VALUES = [
    0, 1, -1, 1 << 63, 10**30, 10**4299, 1.5, 1e308, "", "m", "1e9", "9" * 400, "64 GiB", "lru", "os:system", "ttl",
    None, True, [], [1], {}, {"a": "b"}, {"": {"": []}},
]  # fmt: skip


class Source:
    """Draws choices from bytes. After the last byte every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def raw(self, nbytes: int) -> bytes:
        found = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return found

    def below(self, count: int) -> int:
        return int.from_bytes(self.raw(1 if count <= 256 else 4), "little") % count

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


def message(source: Source, *, without: tuple[type, ...] = ()) -> messages.Message:
    """Build one request with hostile fields."""
    kinds = [kind for kind in get_args(messages.Request) if kind not in without]
    made: messages.Message = structure(source.pick(kinds), source)
    made.group = source.pick([SPACE.group.digest, SPACE.group.digest, OTHER_SPACE.group.digest, b"", b"x" * 16])
    return made


def answer(source: Source) -> messages.Message:
    """Build one answer with hostile fields."""
    made: messages.Message = structure(source.pick(get_args(messages.Answer)), source)
    return made


@cache
def _fields(kind: type) -> tuple[Any, ...]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found.fields


def structure(kind: type, source: Source) -> Any:
    """Build a struct. Fields with a default are left out now and then."""
    given = {
        field.name: value_of(field.type, field.name, source)
        for field in _fields(kind)
        if field.required or source.below(8)
    }
    return kind(**given)


def value_of(kind: Any, name: str, source: Source) -> Any:
    """Build a value of a type, as `msgspec.inspect` describes the type of field `name`."""
    match kind:
        case inspect.Metadata():
            return value_of(kind.type, name, source)
        case inspect.UnionType():
            return value_of(source.pick(kind.types), name, source)
        case inspect.StructType():
            return structure(kind.cls, source)
        case inspect.TupleType():
            return tuple(value_of(each, name, source) for each in kind.item_types)
        case inspect.VarTupleType() | inspect.ListType():
            items = [value_of(kind.item_type, name, source) for _ in range(source.pick([0, 1, 1, 2, 3, 40]))]
            return tuple(items) if isinstance(kind, inspect.VarTupleType) else items
        case inspect.DictType():
            types = (kind.key_type, kind.value_type)
            return dict([value_of(each, name, source) for each in types] for _ in range(source.below(4)))
    return SCALARS[type(kind)](name, source)


SCALARS: dict[type, Callable[[str, Source], Any]] = {
    inspect.IntType: lambda name, source: small_or(source, INTEGERS),
    inspect.FloatType: lambda name, source: source.pick(FLOATS),
    inspect.StrType: lambda name, source: source.pick(TEXTS),
    inspect.BoolType: lambda name, source: source.below(2) == 1,
    inspect.NoneType: lambda name, source: None,
    inspect.BytesType: lambda name, source: bytes_of(name, source),
}


def small_or(source: Source, options: Sequence[int]) -> int:
    """Draw a number that may be valid, three times of four, or else one of `options`."""
    return source.pick([1, 2, 8, 4096, 4096, 0]) if source.below(4) else source.pick(options)


def bytes_of(name: str, source: Source) -> bytes:
    """Build the content of a field of bytes: of the kind that its name asks for, or of another kind."""
    kinds: dict[str, Callable[[Source], bytes]] = {
        **dict.fromkeys(("keys", "added", "removed", "parent"), keys),
        **dict.fromkeys(("rows", "positions", "places", "unused"), numbers("i", [0, 1, 2, 3, 4, 5, 6, 7, -1, 1 << 30])),
        **dict.fromkeys(("checksums", "offsets"), numbers("Q", [*INTEGERS[:5], 4096, 8192, 1 << 63])),
        "nbytes": numbers("I", [0, 1, 4096, 4096, 4096, (1 << 32) - 1]),
        "namespace": namespace,
        "fields": config,
        "registry": registry,
        "stats": stats,
        "group": lambda source: source.pick([SPACE.group.digest, b"", b"x"]),
    }
    made = kinds.get(name)
    if made is None or not source.below(6):
        made = source.pick([*kinds.values(), lambda source: source.raw(source.below(64))])
    found = made(source)
    return found if source.below(8) else found[: source.below(max(1, len(found)))]


def keys(source: Source) -> bytes:
    first = source.below(len(CHUNKS))
    return keys_of(CHUNKS[first : first + source.pick([1, 1, 0, 2, 3, 8, 40])]) * source.pick([1, 1, 1, 2])


def numbers(kind: str, options: Sequence[int]) -> Callable[[Source], bytes]:
    def made(source: Source) -> bytes:
        count, highest = source.pick([1, 0, 2, 3, 8, 40]), (1 << 8 * struct.calcsize(kind)) - 1
        found = [source.pick(options) if kind == "i" else source.pick(options) & highest for _ in range(count)]
        return struct.pack(f"<{count}{kind}", *found)

    return made


def mutated_json(fields: dict[str, Any], source: Source) -> bytes:
    """Encode fields after some have been replaced, added, or broken in the text."""
    for _ in range(source.below(4)):
        fields[source.pick([*fields, "extra", "policy", "ttl_s", "dram_quota_nbytes", ""])] = source.pick(JSON_VALUES)
    text = json.dumps(fields).encode()
    if not source.below(6):
        at = source.below(len(text))
        text = text[:at] + source.raw(source.below(4)) + text[at + source.below(3) :]
    return text


def namespace(source: Source) -> bytes:
    chosen = source.pick([SPACE, SPACE, OTHER_SPACE, SPACE.with_fields(model=f"m{source.below(64)}")])
    return mutated_json(chosen.model_dump(mode="json", exclude_defaults=True), source)


def config(source: Source) -> bytes:
    return mutated_json(source.pick([{}, {"ttl_s": 60}, {"priority": -3}, {"dram_quota_nbytes": "1 MiB"}]), source)


def stats(source: Source) -> bytes:
    group: dict[str, Any] = {"config": {}, "get_counts": [1], "put_counts": [], "chunks": 3, "misses": {"evicted": 2}}
    for _ in range(source.below(3)):
        group[source.pick([*group])] = source.pick(JSON_VALUES)
    namespaces = {namespace(source).decode("latin-1"): group, SPACE.model_dump_json(): group}
    return mutated_json({"arena_nbytes": 1, "used_nbytes": 1, "lent_nbytes": 0, "namespaces": namespaces}, source)


def registry(source: Source) -> bytes:
    made = NamespaceRegistry(version=small_or(source, INTEGERS))
    made.configure(source.pick([SPACE, OTHER_SPACE]), {"priority": source.below(100)}, now_ns=source.below(300))
    if source.below(2):
        made.drop(OTHER_SPACE, now_ns=source.below(300))
    fields = json.loads(made.encode())
    for _ in range(source.below(3)):
        entry = source.pick(fields["entries"])
        entry[source.pick(["changed_ns", "dropped_ns", "config", "namespace"])] = source.pick(JSON_VALUES)
    if not source.below(4):
        fields[source.pick(["version", "entries"])] = source.pick(JSON_VALUES)
    return json.dumps(fields).encode()
