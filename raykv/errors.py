"""Every error that raykv raises, and what the caller should do.

    RayKVError
    ├── UsageError          fix your call or your configuration
    │   ├── ConfigError         a field of a configuration is wrong; the message names it
    │   └── NamespaceMismatch   a hand-off ticket belongs to another namespace; the message names the fields that differ
    ├── TransientError      refresh the view and try again, or treat the chunk as a miss
    │   ├── PeerUnavailable     the peer is down, or did not answer by the deadline
    │   └── ProtocolError       the peer uses another protocol or another version
    ├── CapacityError       too many namespaces: continue without storing
    └── LostError           stored bytes are gone: recompute the chunk

A miss, a full arena during `put`, and a stale location raise no error. The engine adapters (`raykv.integrations`) catch
`RayKVError` and recompute, so no error of the cache makes a request fail.
"""


class RayKVError(Exception):
    """Base class of all errors raised by raykv."""


class UsageError(RayKVError, ValueError):
    """An argument of the call is wrong. Fix the call; a retry fails again."""


class ConfigError(UsageError):
    """A configuration field is wrong. The message names the field and the remedy."""


class NamespaceMismatch(UsageError):
    """A hand-off ticket belongs to another namespace. The message names the fields that differ."""


class TransientError(RayKVError):
    """The cluster is changing or a peer is down. Refresh the view and try again, or treat the chunk as a miss."""


class PeerUnavailable(TransientError):
    """A peer is down, or did not answer by the deadline."""


class ProtocolError(TransientError):
    """The peer sent bytes that are not a message of this protocol version."""


class CapacityError(RayKVError):
    """Too many namespaces are in use, or too many have a config. Continue without storing."""


class LostError(RayKVError):
    """Stored bytes are gone: evicted, corrupt, or their node died. Recompute the chunk."""


class DamagedError(LostError):
    """The chunk table of a node contradicts itself. The node restarts by itself."""
