"""Settings of a whole cluster."""

from typing import Annotated

from pydantic import Field

from raykv.config.base import Model, Name, Seconds
from raykv.config.storage import StorageConfig


class ClusterConfig(Model):
    """A whole cluster, as `raykv.cluster.start` and `raykv up` take it.

    Attributes:
        name: Name of the cluster.
        storage: Memory of each node.
        arena_share: Instead of storage.arena_nbytes: the arena of each node is this share of the size of its shm_dir,
            so that large hosts give more than small ones.
        member_timeout_s: A node that is silent for this long leaves the view.
        separate_hosts: Treat every Ray node as a host of its own, also if several run on one machine: no shared memory
            between them. For tests and demonstrations of a network.
    """

    name: Name = "default"
    storage: StorageConfig = StorageConfig()
    arena_share: Annotated[float, Field(gt=0.0, le=0.95)] | None = None
    member_timeout_s: Seconds = 5.0
    separate_hosts: bool = False
