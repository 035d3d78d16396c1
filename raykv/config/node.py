"""Settings of one storage node."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raykv.config.base import Model, Name, Seconds
from raykv.config.storage import StorageConfig


class NodeConfig(Model):
    """Settings of one storage node.

    Attributes:
        cluster: Name of the cluster. It is part of all names of files and actors.
        node_id: The node's name, unique in its cluster. With the same name a restarted node finds its memory.
        bind: Address on which the node listens for peers and clients. Port 0 means any free port.
        host: Identity of the host. Nodes and clients with equal hosts share memory. None means the detected identity.
        weight: The node's share of the hash ring, relative to other nodes. None means the arena's size in GiB.
        heartbeat_s: Time between heartbeats to the directory.
        announce_s: The longest time from a commit to its announcement to the owners of its keys.
        io_timeout_s: A peer that stalls for this long in the middle of a message is disconnected.
        max_connections: Connections served at once. Further connections are refused.
        max_locations: The most keys whose locations this node stores as their owner. Then the oldest are dropped.
        storage: The node's memory.
    """

    cluster: Name = "default"
    node_id: Name
    bind: Annotated[str, Field(pattern=r"^[^:\s]+:\d{1,5}$")] = "127.0.0.1:0"
    host: str | None = None
    weight: Annotated[float, Field(gt=0)] | None = None
    storage: StorageConfig = StorageConfig()
    heartbeat_s: Seconds = 1.0
    announce_s: Seconds = 0.01
    io_timeout_s: Seconds = 10.0
    max_connections: Annotated[int, Field(ge=4, le=65536)] = 1024
    max_locations: Annotated[int, Field(ge=1024)] = 1 << 22

    @property
    def file_prefix(self) -> Path | None:
        """The common prefix of the paths of this node's files in shared memory. None means anonymous memory."""
        if self.storage.shm_dir is None:
            return None
        return self.storage.shm_dir / f"raykv-{self.cluster}-{self.node_id}"

    @property
    def local_address(self) -> str:
        """The node's address for processes of this host: a socket file, or an abstract socket for anonymous memory."""
        if self.file_prefix is None:
            return f"unix:@raykv-{self.cluster}-{self.node_id}-{os.getpid()}"
        return f"unix:{self.file_prefix}.sock"
