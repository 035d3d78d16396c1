"""All settings of raykv.

Configs are frozen and refuse unknown fields. A field whose name ends in `_nbytes` is a number of bytes; it also accepts
text such as "4 GiB". A field whose name ends in `_s` is a number of seconds. Only `raykv.config.environment` reads
environment variables.
"""

from raykv.config.base import (
    GIB,
    KIB,
    MIB,
    SLOT_ALIGNMENT_NBYTES,
    HugePages,
    Model,
    Name,
    Nbytes,
    Nics,
    Nixl,
    Rdma,
    nic_names,
    nixl_backends,
    parse_nbytes,
    rdma_devices,
)
from raykv.config.client import ClientConfig
from raykv.config.environment import environment_of_child, native_wanted
from raykv.config.node import ClusterConfig, NodeConfig
from raykv.config.storage import (
    HIGHEST_PRIORITY,
    POLICY_NAMES,
    FileTierConfig,
    NamespaceConfig,
    SsdConfig,
    StorageConfig,
)
from raykv.config.tls import TlsConfig

__all__ = [
    "GIB",
    "HIGHEST_PRIORITY",
    "KIB",
    "MIB",
    "POLICY_NAMES",
    "SLOT_ALIGNMENT_NBYTES",
    "ClientConfig",
    "ClusterConfig",
    "FileTierConfig",
    "HugePages",
    "Model",
    "Name",
    "NamespaceConfig",
    "Nbytes",
    "Nics",
    "Nixl",
    "NodeConfig",
    "Rdma",
    "SsdConfig",
    "StorageConfig",
    "TlsConfig",
    "environment_of_child",
    "native_wanted",
    "nic_names",
    "nixl_backends",
    "parse_nbytes",
    "rdma_devices",
]
