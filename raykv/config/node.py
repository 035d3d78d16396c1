"""Settings of one storage node, and of a cluster of nodes."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raykv.config.base import Model, Name, Nbytes, Nics, Nixl, Rdma, Seconds, SocketLibrary
from raykv.config.storage import StorageConfig
from raykv.config.tls import TlsConfig


class NodeConfig(Model):
    """Settings of one storage node.

    Attributes:
        cluster: Name of the cluster. It is part of the names of all files and actors.
        node_id: The node's name, unique in its cluster. A node that restarts with the same name finds its memory.
        bind: Address on which the node listens for peers and clients. Port 0 means any free port.
        host: Identity of the host. Nodes and clients with equal hosts share memory. None means the detected identity.
        heartbeat_s: Time between heartbeats to the directory.
        io_timeout_s: A peer that stalls for this long in the middle of a message is disconnected.
        max_connections: At most this many connections are served at once on each address. Further ones are refused.
        storage: The node's memory and tiers.
        rdma: "auto": use all active RDMA devices of the host, if pyverbs is installed and there is no TLS. "off": use
            none. Otherwise the names of the devices to use, such as "mlx5_0,mlx5_1"; their bytes are not encrypted.
        nixl: "off": no NIXL. "auto": use its backend UCX, if it is installed and there is no TLS. Otherwise names
            of backends, such as "UCX". See docs/security.md before you turn it on.
        nics: The NICs over which other hosts read chunks from this node: names of interfaces, or their IPv4 addresses,
            such as "eth1,eth2". Large reads use all of them at once. "auto" or "off": only the address in `bind`.
        tls: Certificates for all TCP connections of this node. None: no TLS.
        socket_library: An accelerated socket library through which the node's process makes its socket calls: a name
            such as "libvma.so", or a path. The supervisor is started with it in LD_PRELOAD; engines and clients have to
            be started with it themselves (docs/transport.md). None: the kernel's sockets.
    """

    cluster: Name = "default"
    node_id: Name
    bind: Annotated[str, Field(pattern=r"^[^:\s]+:\d{1,5}$")] = "127.0.0.1:0"
    host: str | None = None
    storage: StorageConfig = StorageConfig()
    heartbeat_s: Seconds = 1.0
    io_timeout_s: Seconds = 10.0
    max_connections: Annotated[int, Field(ge=4, le=65536)] = 1024
    nixl: Nixl = "off"
    rdma: Rdma = "auto"
    nics: Nics = "auto"
    tls: TlsConfig | None = None
    socket_library: SocketLibrary | None = None

    @property
    def file_prefix(self) -> Path | None:
        """The common prefix of the paths of this node's files in shared memory. None means anonymous memory."""
        if self.storage.shm_dir is None:
            return None
        return self.storage.shm_dir / f"raykv-{self.cluster}-{self.node_id}"

    @property
    def local_address(self) -> str:
        """The node's Unix socket for processes of this host. With anonymous memory, the socket has no file."""
        if self.file_prefix is None:
            return f"unix:@raykv-{self.cluster}-{self.node_id}-{os.getpid()}"
        return f"unix:{self.file_prefix}.sock"


class ClusterConfig(Model):
    """Settings for `raykv.cluster.start` and `raykv up`.

    Attributes:
        name: Name of the cluster.
        storage: Memory and tiers of each node.
        arena_share: Size of each node's arena as a share of the file system of storage.shm_dir. If this is set,
            storage.arena_nbytes has no effect.
        member_timeout_s: A node that sends no heartbeat for this long is removed from the view (the list of members).
        hot_nbytes_per_s: If at least this many bytes of a prefix are read per second, it can get replicas on other
            nodes, in proportion to its share of the load. None means no replicas.
        separate_hosts: If true, Ray nodes on one machine do not read each other's shared memory. This simulates a
            network, for tests and demonstrations.
        nixl: As NodeConfig.nixl, for each node.
        rdma: As NodeConfig.rdma, for each node.
        nics: As NodeConfig.nics, for each node; so name interfaces, not addresses.
        tls: Certificates of each node. The files must be on every host. None: no TLS.
        socket_library: As NodeConfig.socket_library, for each node. It must be installed on every host.
    """

    name: Name = "default"
    storage: StorageConfig = StorageConfig()
    arena_share: Annotated[float, Field(gt=0.0, le=0.95)] | None = None
    member_timeout_s: Seconds = 5.0
    hot_nbytes_per_s: Nbytes | None = 16_000_000
    separate_hosts: bool = False
    nixl: Nixl = "off"
    rdma: Rdma = "auto"
    nics: Nics = "auto"
    tls: TlsConfig | None = None
    socket_library: SocketLibrary | None = None
