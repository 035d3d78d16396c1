"""raykv: a distributed KV cache for LLM inference.

>>> import raykv
>>> with raykv.embedded(nodes=3) as cluster:
...     client = cluster.client(raykv.Namespace(model="demo"))
...     client.put(["a", "b"], [b"first", b"other"]).stored
2
"""

import sys
from typing import TYPE_CHECKING, Any

from raykv.client import Client
from raykv.config import ClientConfig, ClusterConfig, NamespaceConfig, NodeConfig, StorageConfig
from raykv.embedded import EmbeddedCluster, embedded
from raykv.errors import (
    CapacityError,
    ConfigError,
    LostError,
    NamespaceMismatch,
    PeerUnavailable,
    ProtocolError,
    RayKVError,
    TransientError,
    UsageError,
)
from raykv.handoff import Ticket
from raykv.local import Pins, Reservation
from raykv.namespace import Namespace
from raykv.reach import Reach
from raykv.types import GetResult, Match, PutResult
from raykv.why import Why

if TYPE_CHECKING:
    from raykv.aio import AsyncClient

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "CapacityError",
    "Client",
    "ClientConfig",
    "ClusterConfig",
    "ConfigError",
    "EmbeddedCluster",
    "GetResult",
    "LostError",
    "Match",
    "Namespace",
    "NamespaceConfig",
    "NamespaceMismatch",
    "NodeConfig",
    "PeerUnavailable",
    "Pins",
    "ProtocolError",
    "PutResult",
    "RayKVError",
    "Reservation",
    "StorageConfig",
    "Ticket",
    "TransientError",
    "UsageError",
    "Why",
    "__version__",
    "connect",
    "embedded",
]


def connect(namespace: Namespace, *, address: str | None = None, secret: str | None = None, **config: Any) -> Client:
    """Join the cache.

    Args:
        namespace: What the chunks are computed under.
        address: Any node: "unix:/path" on this host, "host:port" elsewhere. None: RAYKV_ADDRESS; or, in a process that
            has joined Ray, this machine's node of the cluster that `raykv up` started.
        secret: The cluster's secret, for "host:port". None: RAYKV_SECRET.
        config: Other fields of ClientConfig.

    Raises:
        ConfigError: A field is wrong, or there is no address to be found.
        TransientError: Nobody answers there.
    """
    settings = ClientConfig.from_environment(address=address, secret=secret, **config)
    if settings.address is None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            raise ConfigError(
                "field 'address': none given, RAYKV_ADDRESS is not set, and this process has not joined Ray; "
                "pass address=..., or call ray.init(address='auto') first"
            )
        from raykv.cluster import find_address

        settings = ClientConfig.load({**settings.model_dump(exclude_none=True), **find_address()})
    return Client(namespace, Reach(settings))


def __getattr__(name: str) -> Any:
    """Import `AsyncClient` on its first use: asyncio alone takes as long as half of raykv, and nodes start without."""
    if name == "AsyncClient":
        from raykv.aio import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
