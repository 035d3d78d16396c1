"""Settings of one client."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr

from raykv.config.base import Model, Nics, Nixl, Rdma, Seconds
from raykv.config.environment import client_fields
from raykv.config.tls import TlsConfig


class ClientConfig(Model):
    """Settings of one client.

    Attributes:
        address: Address of any node: "unix:/path" for a node on this host, "host:port" for another host.
        secret: The cluster's secret, as hexadecimal text; needed only for "host:port".
        tls: Certificates for connections to other hosts. None: those of the node on this host, if the client has joined
            through it; otherwise no TLS.
        timeout_s: Time limit of calls that give no `timeout_s`. In a `get`, chunks that arrive later count as misses.
        breaker_s: If a peer does not answer or is far too slow, the client sends no further request to this peer for
            this long, and for up to four times as long if it does not recover. 0 means that every request is sent.
        connections_per_peer: At most this many idle connections to one peer stay open. Further connections are closed.
        streams_per_peer: A large read from one peer is divided among this many connections. None means a number that
            depends on the number of cores.
        copy_threads: Number of threads that share the copy of a large batch on this host. None means half the
            number of cores, at most 4.
        rdma: "auto": use all active RDMA devices of the host, if pyverbs is installed and there is no TLS. "off": use
            none. Otherwise the names of the devices to use, such as "mlx5_0,mlx5_1"; their bytes are not encrypted.
        nixl: "off": no NIXL. "auto": use its backend UCX, if it is installed and there is no TLS. Otherwise names
            of backends, such as "UCX". See docs/security.md before you turn it on.
        nics: The NICs over which large reads from other hosts arrive. "auto": the routing table chooses a NIC for each
            address of the node that is read. "off": use only the node's first address. Otherwise names of interfaces,
            or their IPv4 addresses, such as "eth1,eth2": the first is used with a node's first NIC, and so on.
        verify: "remote" verifies the checksums of bytes from the network, "always" verifies all checksums, and "never"
            verifies none.
    """

    address: str | None = None
    secret: SecretStr | None = None
    tls: TlsConfig | None = None
    timeout_s: Seconds = 5.0
    breaker_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    connections_per_peer: Annotated[int, Field(ge=1, le=64)] = 4
    streams_per_peer: Annotated[int, Field(ge=1, le=16)] | None = None
    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    nixl: Nixl = "off"
    rdma: Rdma = "auto"
    nics: Nics = "auto"
    verify: Literal["remote", "always", "never"] = "remote"

    @classmethod
    def from_environment(cls, **explicit: Any) -> Self:
        """Make the config. Environment variables are the defaults: see `raykv.config.environment.client_fields`."""
        return cls.load(client_fields() | {key: value for key, value in explicit.items() if value is not None})
