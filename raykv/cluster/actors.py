"""The two kinds of actors, thin shells around `Directory` and `Node`."""

import logging
import os
import threading
import time
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.config import ClusterConfig, NodeConfig
from raykv.errors import ConfigError, PeerUnavailable, RayKVError
from raykv.membership.membership import Directory, Pulse
from raykv.memory.arena import sized_by_share
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.protocol.trace_requests import TracedRequest
from raykv.storage.orphans import ABANDONED_S, forget_unowned, sweep
from raykv.supervisor.handle import NodeHandle
from raykv.types import NodeId

log = logging.getLogger(__name__)

NAMESPACE: Final = "raykv"
"""Ray namespace of all actors here."""
RECONCILE_S: Final = 1.0
BEAT_TIMEOUT_S: Final = 3.0
WATCH_S: Final = 0.5
STEP_ASIDE_S: Final = 0.2
SWEEP_AGAIN_S: Final = ABANDONED_S / 10
"""Where there was no room for a node, this often what others may have left is looked at again."""
NODE_ID_LENGTH: Final = 16
"""Of Ray's 56 characters; a socket's path must stay short."""


def directory_name(cluster: str) -> str:
    """Name of the directory actor."""
    return f"raykv:{cluster}:directory"


def node_name(cluster: str, ray_node_id: str) -> str:
    """Name of the node actor on a Ray node."""
    return f"raykv:{cluster}:node:{ray_node_id}"


def living_ray_nodes() -> set[str]:
    """Ids of the Ray nodes that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class DirectoryActor:
    """The directory, and the loop that puts a node actor on every Ray node.

    Its arguments are kept by Ray: reborn after a crash, it has the secret and the configuration again, finds the node
    actors by their names, and learns the view from the first of them that calls.
    """

    def __init__(self, config: ClusterConfig, secret: bytes) -> None:
        self._config, self._secret = config, secret
        self._directory = Directory(member_timeout_s=config.member_timeout_s)
        self._lock = threading.Lock()
        self._nodes: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._reconciler = threading.Thread(target=self._reconcile_forever, name="raykv-reconcile", daemon=True)
        self._reconciler.start()

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, register: bytes | None = None
    ) -> Pulse:
        """A node lives; see `Directory.beat`."""
        with self._lock:
            return self._directory.beat(member, epoch, view, now_s=time.monotonic(), version=version, register=register)

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, register: bytes | None = None) -> bytes:
        """See `DirectoryPort.configure`."""
        with self._lock:
            return self._directory.configure(namespace, fields, register, now_ns=time.time_ns())

    def leave(self, node_id: NodeId) -> None:
        """A node goes."""
        with self._lock:
            self._directory.leave(node_id)

    def describe(self) -> dict[str, Any]:
        """Configuration, process and view."""
        with self._lock:
            return {"config": self._config, "pid": os.getpid(), "view": self._directory.view}

    def secret(self) -> str:
        """The cluster's secret, for clients that come by "host:port"."""
        return self._secret.hex()

    def stop(self, timeout_s: float) -> None:
        """Stop all nodes and forget their memory. The caller ends this actor afterwards."""
        self._stopping.set()
        self._reconciler.join(timeout_s)
        for ray_node_id in living_ray_nodes():  # also those that a directory before this one has started
            try:
                self._nodes.setdefault(
                    ray_node_id, ray.get_actor(node_name(self._config.name, ray_node_id), namespace=NAMESPACE)
                )
            except ValueError:
                pass
        stopped = {handle: handle.stop.remote() for handle in self._nodes.values()}
        for handle, done in stopped.items():
            try:
                ray.get(done, timeout=timeout_s)
            except ray.exceptions.RayError as error:
                log.warning("a node did not stop by itself: %s", error)
            ray.kill(handle, no_restart=True)

    def _reconcile_forever(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reconcile()
            except ray.exceptions.RayError as error:
                log.warning("could not look after the nodes, will try again: %s", error)
            with self._lock:
                for node_id in self._directory.expire(now_s=time.monotonic()):
                    log.warning("node %s is silent and leaves the view", node_id)
            self._stopping.wait(RECONCILE_S)

    def _reconcile(self) -> None:
        alive = living_ray_nodes()
        for ray_node_id in alive - set(self._nodes):
            self._nodes[ray_node_id] = self._start_node(ray_node_id)
        for ray_node_id in set(self._nodes) - alive:
            ray.kill(self._nodes.pop(ray_node_id), no_restart=True)  # else Ray would wait for that node for ever

    def _start_node(self, ray_node_id: str) -> Any:
        actor = ray.remote(NodeActor).options(
            name=node_name(self._config.name, ray_node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
        )
        return actor.remote(self._config, self._secret)


class RayDirectory:
    """The directory as a node sees it through Ray."""

    def __init__(self, cluster: str) -> None:
        self._name = directory_name(cluster)
        self._handle: Any = None

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, register: bytes | None = None
    ) -> Pulse:
        """See `DirectoryPort`."""
        pulse: Pulse = self._call("beat", member, epoch, view, version, register)
        return pulse

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, register: bytes | None = None) -> bytes:
        """See `DirectoryPort`."""
        told: bytes = self._call("configure", namespace, fields, register)
        return told

    def leave(self, node_id: NodeId) -> None:
        """See `DirectoryPort`."""
        self._call("leave", node_id)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=BEAT_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RayKVError):  # it answers, and refuses
                raise cause from None
            self._handle = None
            raise PeerUnavailable(f"the directory is away: {error}") from error


class NodeActor:
    """One node on one Ray node, in a child process that is made anew whenever it ends; see `raykv.supervisor.handle`.

    When the configuration cannot be served here (too little memory, say), the actor stays up without a node, so that
    `describe` can tell why, until memory that others left here has gone.
    """

    def __init__(self, cluster: ClusterConfig, secret: bytes) -> None:
        ray_node_id = ray.get_runtime_context().get_node_id()
        config = NodeConfig(
            cluster=cluster.name,
            node_id=ray_node_id[:NODE_ID_LENGTH],
            bind=f"{ray.util.get_node_ip_address()}:0",
            host=f"ray-{ray_node_id}" if cluster.separate_hosts else None,
            storage=cluster.storage,
        )
        self._node: NodeHandle | None = None
        self._problem = ""
        self._stopping = threading.Event()
        self._prefix = config.file_prefix
        sweep(config, {name[:NODE_ID_LENGTH] for name in living_ray_nodes()}, now_s=time.time())
        try:
            if cluster.arena_share is not None:
                storage = sized_by_share(cluster.storage, cluster.arena_share)
                config = config.model_copy(update={"storage": storage})
            self._node = NodeHandle(config, secret=secret, directory=RayDirectory(cluster.name))
        except ConfigError as error:
            log.error("no node here: %s", error)
            self._problem = str(error)
            threading.Thread(target=self._await_room, args=(config,), name="raykv-room", daemon=True).start()
            return
        except Exception:  # Ray makes an actor anew whose process ends, but not one whose constructor raises
            log.critical("the node does not start; ending this process", exc_info=True)
            os._exit(1)
        threading.Thread(target=self._watch, name="raykv-watch", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Its place, its processes, and its figures.

        Raises:
            PeerUnavailable: The node does not answer.
        """
        if self._node is None:
            return {"pid": os.getpid(), "error": self._problem}
        figures = self._node.stats()
        return {"pid": self._node.pid, "actor_pid": os.getpid(), "starts": self._node.starts, **figures}

    def record(self, on: bool) -> tuple[list[TracedRequest], int]:
        """See `Node.record`; nothing while there is no node."""
        return self._node.record(on) if self._node is not None else ([], 0)

    def stop(self) -> None:
        """Leave the cluster and forget the memory."""
        self._stopping.set()
        if self._node is not None:
            self._node.stop(unlink=True)
        elif self._prefix is not None:
            forget_unowned(self._prefix)

    def step_aside(self) -> None:
        """Stop serving and keep the memory, for the processes that come after these. Ends this process."""
        self._stopping.set()
        if self._node is not None:
            self._node.stop()
        threading.Timer(STEP_ASIDE_S, os._exit, (0,)).start()  # after the answer

    def _await_room(self, config: NodeConfig) -> None:
        """End this process when memory that others left here is gone: Ray starts it again, and there may be room now.

        A Ray node that is made anew on its host finds its own former memory there, which counts as in use for a while.
        """
        while not self._stopping.wait(SWEEP_AGAIN_S):
            try:
                gone = sweep(config, {name[:NODE_ID_LENGTH] for name in living_ray_nodes()}, now_s=time.time())
            except Exception:  # Ray's head is away, say; it may come back
                log.warning("cannot look for memory that others left", exc_info=True)
                continue
            if gone:
                log.warning("the memory of %s is gone: trying again whether there is room", ", ".join(gone))
                os._exit(1)

    def _watch(self) -> None:
        """End this process, visibly, when nobody keeps the node any more; Ray starts it again."""
        node = self._node
        assert node is not None
        while not self._stopping.wait(WATCH_S):
            if node.ended:
                log.critical("nobody keeps the node any more; ending this process")
                os._exit(1)
