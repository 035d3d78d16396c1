"""Every setting of raykv, typed.

Models are frozen and refuse unknown fields. Sizes end in `_nbytes` and also accept text such as "4 GiB"; times end in
`_s`. A part that is absent is `None`. Only `raykv.config.environment` reads the environment.
"""

from raykv.config.base import GIB, KIB, MIB, SLOT_ALIGNMENT_NBYTES, HugePages, Model, ModelT, Name, Nbytes, parse_nbytes
from raykv.config.client import ClientConfig
from raykv.config.cluster import ClusterConfig
from raykv.config.environment import environment_of_child, native_wanted
from raykv.config.node import NodeConfig
from raykv.config.storage import (
    HIGHEST_PRIORITY,
    POLICY_NAMES,
    FileTierConfig,
    NamespaceConfig,
    PolicyName,
    SsdConfig,
    StorageConfig,
    parse_policy,
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
    "ModelT",
    "Name",
    "NamespaceConfig",
    "Nbytes",
    "NodeConfig",
    "PolicyName",
    "SsdConfig",
    "StorageConfig",
    "environment_of_child",
    "native_wanted",
    "parse_nbytes",
    "parse_policy",
]
