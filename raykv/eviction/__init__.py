"""Eviction policies by name; each is a file here, imported when it is first asked for."""

from importlib import import_module

from raykv.errors import ConfigError
from raykv.eviction.base import Policy

POLICIES = {
    "leaf_lru": "raykv.eviction.leaf_lru:LeafLRU",
    "lru": "raykv.eviction.lru:LRU",
    "fifo": "raykv.eviction.fifo:FIFO",
}


def policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: There is none; lists those there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"field 'policy': unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    module, _, attribute = POLICIES[name].partition(":")
    made: Policy = getattr(import_module(module), attribute)()
    return made
