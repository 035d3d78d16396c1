"""Eviction policies by name; each is a file here, imported when it is first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from raykv.errors import ConfigError
from raykv.eviction.base import Policy
from raykv.eviction.user_policy import UserPolicy

POLICIES = {
    "leaf_lru": "raykv.eviction.leaf_lru:LeafLRU",
    "lru": "raykv.eviction.lru:LRU",
    "lfu": "raykv.eviction.lfu:LFU",
    "fifo": "raykv.eviction.fifo:FIFO",
    "ttl": "raykv.eviction.ttl:TTL",
    "arc": "raykv.eviction.arc:ARC",
    "s3fifo": "raykv.eviction.s3fifo:S3FIFO",
    "density": "raykv.eviction.density:HitDensity",
}


def policy(name: str | Callable[..., Any]) -> Policy:
    """A new policy.

    Args:
        name: One of POLICIES, or "module:attribute" of a user's own: a subclass of `Policy`, or a function from
            columns, rows and the time in ticks to scores, lowest first. Or such a class or function itself.

    Raises:
        ConfigError: There is none of that name (lists those there are), or the user's own is no policy.
    """
    if not isinstance(name, str):
        return _own(name, getattr(name, "__qualname__", repr(name)))
    known = name in POLICIES
    if not known and ":" not in name:
        raise ConfigError(
            f"field 'policy': unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}, or 'module:attribute'"
        )
    module, _, attribute = POLICIES.get(name, name).partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"field 'policy': {name!r} cannot be imported: {error}") from error
    return _own(found, name)


def _own(found: Any, name: str) -> Policy:
    if isinstance(found, type) and issubclass(found, Policy):
        made: Policy = found()
        made.name = made.name or name
        return made
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"field 'policy': {name} is neither a subclass of Policy nor a function")
    return UserPolicy(found, name)
