"""Settings of a whole cluster."""

from typing import Annotated

from pydantic import Field

from raykv.config.base import Model, Name, Seconds
from raykv.config.storage import StorageConfig


class ClusterConfig(Model):
    """Settings for `raykv.cluster.start` and `raykv up`.

    Attributes:
        name: Name of the cluster.
        storage: Memory of each node.
        arena_share: Size of each node's arena as a share of its shm_dir. Replaces storage.arena_nbytes.
        member_timeout_s: A node that sends no heartbeat for this long is removed from the view.
        separate_hosts: Ray nodes on one machine do not read each other's shared memory. Simulates a network, for tests
            and demonstrations.
    """

    name: Name = "default"
    storage: StorageConfig = StorageConfig()
    arena_share: Annotated[float, Field(gt=0.0, le=0.95)] | None = None
    member_timeout_s: Seconds = 5.0
    separate_hosts: bool = False
