"""The two kinds of actors: thin shells around `InProcessMembership` and `NodeHandle`."""

import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.config import ClusterConfig, NodeConfig
from raykv.errors import ConfigError, PeerUnavailable, RayKVError
from raykv.membership.in_process import InProcessMembership
from raykv.membership.membership import HeartbeatAnswer
from raykv.memory.arena import sized_by_share
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.protocol.trace_requests import TracedRequest
from raykv.storage.orphans import ABANDONED_S, remove_orphans, remove_unowned
from raykv.supervisor.handle import NodeHandle
from raykv.types import NodeId

log = logging.getLogger(__name__)

NAMESPACE: Final = "raykv"
"""Ray namespace of all actors of raykv."""
RECONCILE_S: Final = 1.0
CALL_TIMEOUT_S: Final = 3.0
WATCH_S: Final = 0.5
STEP_ASIDE_S: Final = 0.2
RETRY_ROOM_S: Final = ABANDONED_S / 10
"""If a node did not fit, the memory that other nodes left is checked this often."""
UNOWNED_S: Final = 5.0
"""Time for the processes of a dead Ray node to end, before `stop` gives up on removing their memory."""
NODE_ID_LENGTH: Final = 16
"""Characters of Ray's node id (56 of them) in a node's name: the path of a socket must stay short."""


def directory_name(cluster: str) -> str:
    """Name of the directory actor."""
    return f"raykv:{cluster}:directory"


def node_name(cluster: str, ray_node_id: str) -> str:
    """Name of the node actor on a Ray node."""
    return f"raykv:{cluster}:node:{ray_node_id}"


def ray_nodes(*, alive: bool = True) -> set[str]:
    """Ids of the Ray nodes that are alive, or of those that have ended."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] is alive}


def _names(ray_node_ids: Iterable[str]) -> set[str]:
    """Names of the nodes on these Ray nodes."""
    return {each[:NODE_ID_LENGTH] for each in ray_node_ids}


class DirectoryActor(InProcessMembership):
    """The directory, and the loop that puts a node actor on every Ray node.

    After a crash Ray restarts it with the same arguments, so it has the secret and the configuration. It finds the node
    actors by their names, and adopts the view of the first node that calls.
    """

    def __init__(self, config: ClusterConfig, secret: bytes) -> None:
        super().__init__(member_timeout_s=config.member_timeout_s)
        self._config, self._secret = config, secret
        self._nodes: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._reconciler = threading.Thread(target=self._reconcile_forever, name="raykv-reconcile", daemon=True)
        self._reconciler.start()

    def describe(self) -> dict[str, Any]:
        """Configuration, process and view."""
        return {"config": self._config, "pid": os.getpid(), "view": self.logic.view}

    def secret(self) -> str:
        """The cluster's secret, for clients that connect by "host:port"."""
        return self._secret.hex()

    def stop(self, timeout_s: float) -> None:
        """Stop all nodes and remove their memory, and that of Ray nodes that have ended. The caller ends this actor."""
        self._stopping.set()
        self._reconciler.join(timeout_s)
        for ray_node_id in ray_nodes():  # also those that an earlier directory started
            try:
                self._nodes.setdefault(
                    ray_node_id, ray.get_actor(node_name(self._config.name, ray_node_id), namespace=NAMESPACE)
                )
            except ValueError:
                pass
        dead = _names(ray_nodes(alive=False))
        stopped = {handle: handle.stop.remote(dead) for handle in self._nodes.values()}
        for handle, done in stopped.items():
            try:
                ray.get(done, timeout=timeout_s)
            except ray.exceptions.RayError as error:
                log.warning("a node did not stop in order: %s", error)
            ray.kill(handle, no_restart=True)

    def _reconcile_forever(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reconcile()
            except ray.exceptions.RayError as error:
                log.warning("cannot check the nodes, will try again: %s", error)
            self.expire()
            self._stopping.wait(RECONCILE_S)

    def _reconcile(self) -> None:
        alive = ray_nodes()
        for ray_node_id in alive - set(self._nodes):
            self._nodes[ray_node_id] = self._start_node(ray_node_id)
        for ray_node_id in set(self._nodes) - alive:
            ray.kill(self._nodes.pop(ray_node_id), no_restart=True)  # otherwise Ray waits for that node for ever

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


class RayMembership:
    """The directory as a node's owner calls it: a `MembershipPort` over Ray."""

    def __init__(self, cluster: str) -> None:
        self._name = directory_name(cluster)
        self._handle: Any = None

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, registry: bytes | None = None
    ) -> HeartbeatAnswer:
        """See `MembershipPort`."""
        answer: HeartbeatAnswer = self._call("beat", member, epoch, view, version, registry)
        return answer

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> bytes:
        """See `MembershipPort`."""
        changed: bytes = self._call("configure", namespace, fields, registry)
        return changed

    def leave(self, node_id: NodeId) -> None:
        """See `MembershipPort`."""
        self._call("leave", node_id)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RayKVError):  # it answered with an error
                raise cause from None
            self._handle = None
            raise PeerUnavailable(f"the directory is away: {error}") from error


class NodeActor:
    """One node on one Ray node, in a child process that is restarted when it ends; see `raykv.supervisor.handle`.

    If the configuration cannot be served here (too little memory, for example), the actor stays up without a node and
    `describe` says why. It tries again when memory that other nodes left here is gone.
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
        self._config = config
        remove_orphans(config, _names(ray_nodes()), now_s=time.time())
        try:
            if cluster.arena_share is not None:
                storage = sized_by_share(cluster.storage, cluster.arena_share)
                config = config.model_copy(update={"storage": storage})
            self._node = NodeHandle(config, secret=secret, membership=RayMembership(cluster.name))
        except ConfigError as error:
            log.error("no node here: %s", error)
            self._problem = str(error)
            threading.Thread(target=self._await_room, name="raykv-room", daemon=True).start()
            return
        except Exception:  # Ray restarts an actor whose process ends, but not one whose constructor raises
            log.critical("the node does not start; ending this process", exc_info=True)
            os._exit(1)
        threading.Thread(target=self._watch, name="raykv-watch", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Its processes and its figures.

        Raises:
            PeerUnavailable: The node does not answer.
        """
        if self._node is None:
            return {"pid": os.getpid(), "error": self._problem}
        figures = self._node.stats()
        return {"pid": self._node.pid, "actor_pid": os.getpid(), "starts": self._node.starts, **figures}

    def record(self, on: bool) -> tuple[list[TracedRequest], int]:
        """See `NodeHandle.record_trace`; nothing while there is no node."""
        return self._node.record_trace(on) if self._node is not None else ([], 0)

    def stop(self, dead: Iterable[str] = ()) -> None:
        """Leave the cluster, and remove the memory.

        Args:
            dead: Names of nodes of this cluster whose Ray nodes have ended. Memory that they left on this host is
                removed too.
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
                time.sleep(WATCH_S / 10)  # it ends after its Ray node

    def step_aside(self) -> None:
        """Stop serving, and leave the memory for the next processes. Ends this process."""
        self._stopping.set()
        if self._node is not None:
            self._node.stop()
        threading.Timer(STEP_ASIDE_S, os._exit, (0,)).start()  # after this call was answered

    def _await_room(self) -> None:
        """End this process when memory that other nodes left here is gone: Ray restarts it, and it may fit then.

        A Ray node that restarts on its host finds the memory of its former node there, which counts as used at first.
        """
        while not self._stopping.wait(RETRY_ROOM_S):
            try:
                removed = remove_orphans(self._config, _names(ray_nodes()), now_s=time.time())
            except Exception:  # Ray's head may be away, and come back
                log.warning("cannot look for memory that other nodes left", exc_info=True)
                continue
            if removed:
                log.warning("the memory of %s is gone: restarting, since the node may fit now", ", ".join(removed))
                os._exit(1)

    def _watch(self) -> None:
        """End this process when the supervisor has ended. Ray restarts it."""
        node = self._node
        assert node is not None
        while not self._stopping.wait(WATCH_S):
            if node.ended:
                log.critical("the supervisor has ended; ending this process")
                os._exit(1)
