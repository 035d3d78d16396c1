"""The two kinds of Ray actors: the directory (an `InProcessMembership`) and the node (with a `NodeHandle`)."""

import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.cluster.membership import CALL_TIMEOUT_S, NAMESPACE, Endpoint, RayMembership, open_endpoint
from raykv.config import ClusterConfig, NodeConfig
from raykv.errors import ConfigError, PeerUnavailable
from raykv.membership.membership import InProcessMembership
from raykv.memory.arena import sized_by_share
from raykv.protocol.keyring import Keyring
from raykv.protocol.trace_requests import TracedRequest
from raykv.storage.files import ABANDONED_S, remove_orphans, remove_unowned
from raykv.supervisor.handle import NodeHandle

log = logging.getLogger(__name__)

RECONCILE_S: Final = 1.0
WATCH_S: Final = 0.5
STEP_ASIDE_S: Final = 0.2
LEAVING_NBYTES_PER_S: Final = 2e9
"""Rate at which the chunks of a node are moved whose Ray node is about to end."""
RETRY_ROOM_S: Final = ABANDONED_S / 10
"""If a node does not fit into memory, its actor tries at this interval to remove the memory of dead nodes."""
UNOWNED_S: Final = 5.0
"""`NodeActor.stop` waits at most this long for a node's process to end. A process that still runs keeps its memory."""
NODE_ID_LENGTH: Final = 16
"""A node's name is the first 16 of the 56 characters of Ray's node id. The name is part of a socket's path, and such a
path must be short."""


def node_name(cluster: str, ray_node_id: str) -> str:
    """Return the name of the node actor on a Ray node."""
    return f"raykv:{cluster}:node:{ray_node_id}"


def detached(kind: type, name: str, **options: Any) -> Any:
    """Return the factory of a detached actor. The factory's `remote` starts the actor, or returns the running actor."""
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        **options,
    )


def node_actors(cluster: str) -> dict[str, Any]:
    """Map the id of each live Ray node to its node actor, or to None if the Ray node has no node actor yet."""
    found: dict[str, Any] = dict.fromkeys(sorted(ray_nodes()))
    for ray_node_id in found:
        try:
            found[ray_node_id] = ray.get_actor(node_name(cluster, ray_node_id), namespace=NAMESPACE)
        except ValueError:
            pass
    return found


def ray_nodes(*, alive: bool = True) -> set[str]:
    """Return the ids of the live Ray nodes. With `alive=False`, return the ids of the dead Ray nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] is alive}


def leaving_ray_nodes() -> set[str]:
    """Return the ids of the Ray nodes that Ray drains: on scale-down, or after a notice of preemption."""
    gcs = ray._private.worker.global_worker.gcs_client  # Ray has no public call for this
    return set(gcs.get_draining_nodes(timeout=CALL_TIMEOUT_S))


def _names(ray_node_ids: Iterable[str]) -> set[str]:
    """Return the names of the raykv nodes on these Ray nodes."""
    return {each[:NODE_ID_LENGTH] for each in ray_node_ids}


class DirectoryActor(InProcessMembership):
    """The directory of the cluster's members, and a loop that starts a node actor on every Ray node.

    After a crash, Ray restarts this actor with the same config and the secret that the cluster began with. The actor
    then finds the node actors by their names. It gets the newest view, which is the list of members, and the newest
    secrets from the nodes' heartbeats.
    """

    def __init__(self, config: ClusterConfig, secret: bytes) -> None:
        hot = math.inf if config.hot_nbytes_per_s is None else config.hot_nbytes_per_s
        keyring = Keyring.first(secret)
        super().__init__(member_timeout_s=config.member_timeout_s, hot_nbytes_per_s=hot, keyring=keyring)
        self._config, self._secret = config, secret
        self._nodes: dict[str, Any] = {}
        self._server, self._endpoint = open_endpoint(self, config)
        self._leaving: set[str] = set()  # Ray nodes whose nodes are drained because they are about to end
        self._stopping = threading.Event()
        self._reconciler = threading.Thread(target=self._reconcile_forever, name="raykv-reconcile", daemon=True)
        self._reconciler.start()

    def describe(self) -> dict[str, Any]:
        """Return the cluster's config and view, how far a rotation of the secret is, and this actor's process id."""
        keyring = self.logic.keyring
        assert keyring is not None
        return {
            "config": self._config,
            "pid": os.getpid(),
            "view": self.logic.view,
            "secret": {"stage": keyring.stage, "behind": self.logic.behind()},
        }

    def secret(self) -> str:
        """Return the cluster's secret as hexadecimal text."""
        assert self.logic.keyring is not None
        return self.logic.keyring.current.hex()

    def endpoint(self) -> Endpoint:
        """Return where this process serves the nodes over TCP."""
        return self._endpoint

    def stop(self, timeout_s: float) -> None:
        """Stop all nodes, and remove the memory of live and dead nodes. Afterwards, the caller must end this actor."""
        self._stopping.set()
        self._reconciler.join(timeout_s)
        earlier = {ray_node_id: handle for ray_node_id, handle in node_actors(self._config.name).items() if handle}
        dead = _names(ray_nodes(alive=False))
        stopped = {handle: handle.stop.remote(dead) for handle in {**earlier, **self._nodes}.values()}
        for handle, done in stopped.items():
            try:
                ray.get(done, timeout=timeout_s)
            except ray.exceptions.RayError as error:
                log.warning("a node did not stop in order: %s", error)
            ray.kill(handle, no_restart=True)
        self._server.close()

    def _reconcile_forever(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reconcile()
                self._drain_leaving()
            except ray.exceptions.RayError as error:
                log.warning("cannot check the nodes, will try again: %s", error)
            self.expire()
            self._stopping.wait(RECONCILE_S)

    def _drain_leaving(self) -> None:
        """Drain the nodes whose Ray nodes are about to end, for example because the autoscaler needs them no more."""
        for ray_node_id in leaving_ray_nodes() & set(self._nodes) - self._leaving:
            log.warning("Ray node %s is about to end: draining its node", ray_node_id)
            self._leaving.add(ray_node_id)
            self._nodes[ray_node_id].drain.remote(LEAVING_NBYTES_PER_S)

    def _reconcile(self) -> None:
        alive = ray_nodes()
        for ray_node_id in alive - set(self._nodes):
            self._nodes[ray_node_id] = detached(
                NodeActor,
                node_name(self._config.name, ray_node_id),
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
            ).remote(self._config, self._secret)
        for ray_node_id in set(self._nodes) - alive:
            ray.kill(self._nodes.pop(ray_node_id), no_restart=True)  # otherwise Ray would keep the actor pending


class NodeActor:
    """Runs the raykv node of one Ray node in a child process; see `raykv.supervisor.handle`.

    The node may be unable to run with its config on this host, for example because of too little memory. Then the actor
    runs without a node, and `describe` returns the reason. After the actor has removed memory of dead nodes from the
    host, it restarts and tries again.
    """

    def __init__(self, cluster: ClusterConfig, secret: bytes) -> None:
        ray_node_id = ray.get_runtime_context().get_node_id()
        config = NodeConfig(
            cluster=cluster.name,
            node_id=ray_node_id[:NODE_ID_LENGTH],
            bind=f"{ray.util.get_node_ip_address()}:0",
            host=f"ray-{ray_node_id}" if cluster.separate_hosts else None,
            storage=cluster.storage,
            nixl=cluster.nixl,
            rdma=cluster.rdma,
            nics=cluster.nics,
            tls=cluster.tls,
            socket_library=cluster.socket_library,
        )
        self._node: NodeHandle | None = None
        self._problem = ""
        self._drained: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._config = config
        remove_orphans(config, _names(ray_nodes()), now_s=time.time())
        try:
            if cluster.arena_share is not None:
                storage = sized_by_share(cluster.storage, cluster.arena_share)
                config = config.model_copy(update={"storage": storage})
            self._node = NodeHandle(config, secret=secret, membership=RayMembership(cluster))
        except ConfigError as error:
            log.error("no node here: %s", error)
            self._problem = str(error)
            threading.Thread(target=self._await_room, name="raykv-room", daemon=True).start()
            return
        except Exception:  # Ray restarts an actor after its process ends, but not after its constructor raises
            log.critical("the node does not start; ending this process", exc_info=True)
            os._exit(1)
        threading.Thread(target=self._watch, name="raykv-watch", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Return the process ids and the counters of the node, or the reason why the node does not run.

        Of a drained node, return what the drain has done: see `raykv.node.drain.Progress`.

        Raises:
            PeerUnavailable: The node does not answer.
        """
        node = self._node
        if node is None and self._drained:
            return {"pid": os.getpid(), "drain": self._drained}
        if node is None:
            return {"pid": os.getpid(), "error": self._problem}
        try:
            stats = node.stats()
        except PeerUnavailable:
            if self._node is None:  # drained and stopped meanwhile
                return {"pid": os.getpid(), "drain": self._drained}
            raise
        return {"pid": node.pid, "actor_pid": os.getpid(), "starts": node.starts, **stats}

    def record(self, on: bool) -> list[TracedRequest]:
        """Return the requests recorded since the last call, and turn recording on or off. Without a node, return []."""
        return self._node.record_trace(on) if self._node is not None else []

    def stop(self, dead: Iterable[str] = ()) -> None:
        """Leave the cluster, and remove the node's memory.

        Args:
            dead: Names of this cluster's nodes whose Ray nodes are dead. Their memory on this host is removed too.
        """
        self._stopping.set()
        if self._node is not None:
            self._node.stop(unlink=True)
        until_s = time.monotonic() + UNOWNED_S
        for node_id in {self._config.node_id, *dead}:
            prefix = self._config.model_copy(update={"node_id": node_id}).file_prefix
            while prefix is not None and not remove_unowned(prefix):
                if time.monotonic() >= until_s:
                    log.warning("a process still serves %s: its memory stays", prefix)
                    break
                time.sleep(WATCH_S / 10)  # a node's process ends soon after its Ray node

    def drain(self, nbytes_per_s: float) -> None:
        """Move the node's chunks to other nodes. Then stop the node and free its memory; this actor stays.

        `describe` shows the progress. May be called again.
        """
        if self._node is None:
            return
        self._node.drain(nbytes_per_s)
        if not self._drained:
            self._drained = {"state": "moving"}
            arguments = self._node, nbytes_per_s
            threading.Thread(target=self._retire, args=arguments, name="raykv-retire", daemon=True).start()

    def _retire(self, node: NodeHandle, nbytes_per_s: float) -> None:
        """Wait until the node is drained, then stop it."""
        while self._drained["state"] != "done":
            if self._stopping.wait(WATCH_S):
                return
            try:
                found = node.stats()["drain"]
                if not found:  # the node has restarted meanwhile
                    node.drain(nbytes_per_s)
                self._drained = found or self._drained
            except PeerUnavailable as error:
                log.warning("cannot see how far the drain is: %s", error)
        log.warning("this node is drained: %s", self._drained)
        self._stopping.set()
        self._node = None
        node.stop(unlink=True)

    def step_aside(self) -> None:
        """Stop the node, keep its memory, and end this process. Ray restarts the actor, which starts the node again."""
        self._stopping.set()
        if self._node is not None:
            self._node.stop()
        threading.Timer(STEP_ASIDE_S, os._exit, (0,)).start()  # the delay lets Ray answer this call

    def _await_room(self) -> None:
        """Repeatedly try to remove memory of dead nodes. After a success, end this process, so Ray restarts the actor.

        A Ray node that restarts gets a new id. So the memory of its earlier raykv node is not used again, and still
        occupies the host.
        """
        while not self._stopping.wait(RETRY_ROOM_S):
            try:
                removed = remove_orphans(self._config, _names(ray_nodes()), now_s=time.time())
            except Exception:  # Ray's head may be unreachable for a while
                log.warning("cannot look for memory that other nodes left", exc_info=True)
                continue
            if removed:
                log.warning("the memory of %s is gone: restarting, since the node may fit now", ", ".join(removed))
                os._exit(1)

    def _watch(self) -> None:
        """End this process when the supervisor has ended. Ray restarts the actor, which starts a new supervisor."""
        node = self._node
        assert node is not None
        while not self._stopping.wait(WATCH_S):
            if node.ended:
                log.critical("the supervisor has ended; ending this process")
                os._exit(1)
