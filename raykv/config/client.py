"""Settings of one client."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr

from raykv.config.base import Model, Seconds, SpinSeconds
from raykv.config.environment import client_fields


class ClientConfig(Model):
    """One client.

    Attributes:
        address: Any node: "unix:/path" for the one on this host, "host:port" for one elsewhere.
        secret: The cluster's secret, as hexadecimal text; needed only for "host:port".
        timeout_s: After this time a `get` or `match` counts what is missing as a miss.
        breaker_s: A peer that failed is not asked for this long.
        connections_per_peer: The most idle connections to one peer.
        streams_per_peer: Connections that share a large read from one peer. None: by the number of cores.
        copy_threads: Threads that copy a large batch from or into this host's memory. None: half the cores, at most 4.
        spin_s: A thread that waits for a socket polls it for this long before it sleeps. 0: off.
        verify: Check checksums of bytes that crossed a network ("remote"), of all bytes ("always"), or none ("never").
    """

    address: str | None = None
    secret: SecretStr | None = None
    timeout_s: Seconds = 5.0
    breaker_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    connections_per_peer: Annotated[int, Field(ge=1, le=64)] = 4
    streams_per_peer: Annotated[int, Field(ge=1, le=16)] | None = None
    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    spin_s: SpinSeconds = 0.0
    verify: Literal["remote", "always", "never"] = "remote"

    @classmethod
    def from_environment(cls, **explicit: Any) -> Self:
        """Make the config; RAYKV_ADDRESS and RAYKV_SECRET fill fields that the call leaves open."""
        return cls.load(client_fields() | {key: value for key, value in explicit.items() if value is not None})
