"""The registry of tiers, by name. `register_tier` adds a tier of another package."""

import importlib
import threading
from collections.abc import Callable
from typing import Any, Final, cast

from raykv.config import NodeConfig
from raykv.errors import ConfigError, RayKVError
from raykv.memory.layout import NAMESPACE_TEXT_NBYTES
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Place
from raykv.storage.store import Store
from raykv.tier.base import Environment, Tier
from raykv.tier.mover import TierMover

Opener = Callable[[Any, Environment], Tier]
"""Takes options and environment, and returns the open tier. A tier of another package gets its options as a dict."""


_registered: Final[dict[str, tuple[Opener | str, Place]]] = {}


def register_tier(name: str, opener: Opener | str, place: Place = Place.OTHER) -> None:
    """Register a tier under a name. `StorageConfig.tiers` may then contain {name: options}.

    Args:
        opener: A function or class that opens the tier. A text "module:attribute" is imported at first use.
        place: Kind of storage. Tiers with a lower `place` are searched first.
    """
    _registered[name] = opener, place


register_tier("ssd", "raykv.tier.ssd.tier:SsdTier", Place.SSD)
register_tier("file", "raykv.tier.file.tier:FileTier", Place.FILE)


def open_tier(name: str, options: Any, environment: Environment) -> Tier:
    """Open a registered tier. Raises ConfigError if the name is unknown or the tier cannot be opened."""
    if name not in _registered:
        raise ConfigError(f"field 'tiers': no tier is called {name!r}; there are: {', '.join(sorted(_registered))}")
    opener, place = _registered[name]
    if isinstance(opener, str):
        module, _, attribute = opener.partition(":")
        try:
            opener = cast(Opener, getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"tier {name!r}: {opener!r} cannot be imported: {error}") from None
    tier = opener(options, environment)
    tier.name, tier.place = name, place
    return tier


def open_tiers(config: NodeConfig, store: Store, lock: threading.Lock, *, changed: Callable[[], None]) -> TierMover:
    """Open all tiers of a node's config. `changed`: see `TierMover`. Raises ConfigError if a tier cannot be opened."""
    storage = config.storage
    options = {"ssd": storage.ssd, "file": storage.file, **storage.tiers}
    node = f"raykv-{config.cluster}-{config.node_id}"
    environment = Environment(store.arena.view, node, StoreGroupNames(store, lock))
    tiers: list[Tier] = []
    try:
        for name, given in options.items():
            if given is not None:
                tiers.append(open_tier(name, given, environment))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TierMover(store, lock, sorted(tiers, key=lambda tier: tier.place), changed)


class StoreGroupNames:
    """Implements `tier.base.GroupNames` for one store. The name of a group is its `Namespace` as JSON."""

    def __init__(self, store: Store, lock: threading.Lock) -> None:
        self._store, self._lock = store, lock

    def text(self, group: int) -> bytes:
        return bytes(self._store.table.namespaces["text"][group])

    def number(self, text: bytes) -> int | None:
        if len(text) > NAMESPACE_TEXT_NBYTES:
            return None
        try:
            namespace = Namespace.model_validate_json(text)
            with self._lock:
                return self._store.groups.open(namespace)
        except (ValueError, RayKVError):
            return None
