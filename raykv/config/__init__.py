"""All settings of raykv.

Configs are frozen and refuse unknown fields. Names of sizes end in `_nbytes`; sizes also accept text such as "4 GiB".
Names of times end in `_s`. Only `raykv.config.environment` reads environment variables.
"""

from raykv.config.base import GIB, KIB, MIB, SLOT_ALIGNMENT_NBYTES, HugePages, Model, Name, Nbytes, parse_nbytes
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
    "NodeConfig",
    "SsdConfig",
    "StorageConfig",
    "environment_of_child",
    "native_wanted",
    "parse_nbytes",
]
