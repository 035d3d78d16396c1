"""Every error that raykv raises, by the caller's next move.

    RayKVError
    ├── UsageError          fix your call or your configuration
    │   ├── ConfigError         a field of a configuration is wrong; the message names it
    │   └── NamespaceMismatch   the bytes were made under other conditions; the message names the fields
    ├── TransientError      refresh the view and try again, or treat it as a miss
    │   ├── PeerUnavailable     no answer there, or too late
    │   └── ProtocolError       the peer speaks another version, or not this protocol at all
    ├── CapacityError       no room: store nothing and go on
    └── LostError           bytes that were promised are gone: recompute

A miss, a full arena during `put`, and a stale location are values, not errors. Only the engine adapters
(`raykv.integrations`) catch `RayKVError`, and they recompute: a cache never fails a request.
"""


class RayKVError(Exception):
    """The root of all errors raised by raykv."""


class UsageError(RayKVError, ValueError):
    """The call cannot be served as written. Fix the call; trying again will not help."""


class ConfigError(UsageError):
    """A configuration field is wrong. The message names the field and the remedy."""


class NamespaceMismatch(UsageError):
    """Bytes made under one namespace were offered to another. The message names the fields that differ."""


class TransientError(RayKVError):
    """The cluster is changing or a peer is away. Refresh the view and try again, or take it as a miss."""


class PeerUnavailable(TransientError):
    """A peer does not answer, or not before the deadline."""


class ProtocolError(TransientError):
    """Received bytes are not a message of this protocol version."""


class CapacityError(RayKVError):
    """There is no room. Store nothing and go on."""


class LostError(RayKVError):
    """Bytes that were there are gone (evicted, corrupt, or their holder died). Recompute them."""
