"""raykv: a distributed KV cache for LLM inference.

>>> import raykv
>>> with raykv.embedded(nodes=3) as cluster:
...     client = cluster.client(raykv.Namespace(model="demo"))
...     client.put(["a", "b"], [b"first", b"other"]).stored
2
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raykv.config import ClientConfig, ClusterConfig, NamespaceConfig, NodeConfig, StorageConfig, TlsConfig
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
from raykv.protocol.namespace import Namespace
from raykv.types import GetResult, Match, PutResult

if TYPE_CHECKING:
    from raykv.client.async_client import AsyncClient
    from raykv.client.client import Client
    from raykv.client.leases import Pins, Reservation
    from raykv.client.puts import Put
    from raykv.client.why import Why
    from raykv.protocol.ticket import Ticket

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
    "Put",
    "PutResult",
    "RayKVError",
    "Reservation",
    "StorageConfig",
    "Ticket",
    "TlsConfig",
    "TransientError",
    "UsageError",
    "Why",
    "__version__",
    "connect",
    "embedded",
]

_ON_FIRST_USE: Final = {
    "AsyncClient": "raykv.client.async_client",
    "Client": "raykv.client.client",
    "Pins": "raykv.client.leases",
    "Put": "raykv.client.puts",
    "Reservation": "raykv.client.leases",
    "Ticket": "raykv.protocol.ticket",
    "Why": "raykv.client.why",
}
"""Maps public names to modules that are imported only at first use, so that a node starts faster."""


def connect(namespace: Namespace, *, address: str | None = None, secret: str | None = None, **config: Any) -> "Client":
    """Connect to a cluster, and return a client for one namespace.

    Args:
        namespace: Model and settings that the chunks were computed with.
        address: Address of any node: "unix:/path" on this host, "host:port" elsewhere. None: the value of the
            environment variable RAYKV_ADDRESS. Without that variable, the process must have joined Ray, and the client
            connects to the raykv node of its Ray node.
        secret: The cluster's secret, needed for "host:port". None: the environment variable RAYKV_SECRET.
        config: Other fields of ClientConfig.

    Raises:
        ConfigError: A field is wrong, or no address is found.
        TransientError: No node answers at the address, or no address is given and this Ray node has no raykv node.
    """
    from raykv.client.client import Client
    from raykv.client.router import Router

    settings = ClientConfig.from_environment(address=address, secret=secret, **config)
    if settings.address is None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            raise ConfigError(
                "field 'address': none given, RAYKV_ADDRESS is not set, and this process has not joined Ray; "
                "pass address=..., or call ray.init(address='auto') first"
            )
        from raykv.cluster import find_address

        settings = settings.model_copy(update={"address": find_address()})
    return Client(namespace, Router(settings))


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
