"""Starts, stops and inspects a raykv cluster on the Ray cluster that this process has joined."""

import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import ray

from raykv.cluster.actors import DirectoryActor, detached, node_actors, node_name
from raykv.cluster.membership import NAMESPACE, directory_name
from raykv.config import ClusterConfig
from raykv.errors import ConfigError, PeerUnavailable, UsageError
from raykv.protocol.keyring import Stage
from raykv.protocol.trace_requests import TracedRequest

CALL_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05
DRAIN_POLL_S: Final = 1.0
DRAIN_NBYTES_PER_S: Final = 500e6


def start(config: ClusterConfig | None = None, *, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
    """Start a node on every Ray node, and wait until all nodes have the same view.

    A Ray node that joins later gets a node too. If the cluster runs already with the same config, this call only waits.

    Args:
        config: The cluster's config.
        timeout_s: Time for the nodes to start.
        fields: Fields of ClusterConfig; they override those of `config`.

    Returns:
        The result of `status`.

    Raises:
        ConfigError: A field is wrong, a cluster of this name runs with another config, or a node cannot run with this
            config (for example because of too little memory). In the last case, call `stop` before the next `start`.
        PeerUnavailable: Some nodes did not start in time. The message names these nodes, and the reason if known.
    """
    wanted = ClusterConfig.load({**(config.model_dump(exclude_unset=True) if config else {}), **fields})
    made = detached(DirectoryActor, directory_name(wanted.name), max_concurrency=32)
    directory = made.remote(wanted, secrets.token_bytes(32))
    running = ray.get(directory.describe.remote(), timeout=timeout_s)["config"]
    differing = [name for name in ClusterConfig.model_fields if getattr(running, name) != getattr(wanted, name)]
    if differing:
        raise ConfigError(
            f"cluster {wanted.name!r} already runs with other values of: {', '.join(differing)}; "
            "run 'raykv down' first, or start with another name"
        )

    def is_up(found: dict[str, Any]) -> bool:
        nodes = [node for node in found["nodes"].values() if not is_drained(node)]
        refused = [node["error"] for node in nodes if "pid" in node and "error" in node]
        if refused:
            raise ConfigError(f"a node cannot serve this configuration: {refused[0]}")
        return bool(nodes) and all(node.get("member") and node["epoch"] >= found["epoch"] for node in nodes)

    return _wait_until(is_up, wanted.name, time.monotonic() + timeout_s)


def status(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """Return the processes of a cluster, and the counters of the nodes.

    Returns:
        A dict with these fields:

        * "name": Name of the cluster.
        * "epoch": Version of the directory's list of members.
        * "directory": {"pid": process id}.
        * "secret": {"stage": see `raykv.protocol.keyring.Stage`, "behind": nodes that have not finished this step}.
        * "nodes": For each Ray node id, {"member": bool, "pid": process id, counters...} or {"error": text}.

    Raises:
        PeerUnavailable: No cluster of that name runs.
    """
    described = ray.get(_directory(name).describe.remote(), timeout=timeout_s)
    members = {member.node_id for member in described["view"].members}
    nodes: dict[str, dict[str, Any]] = {}
    asked = {ray_node_id: actor and actor.describe.remote() for ray_node_id, actor in node_actors(name).items()}
    for ray_node_id, answer in asked.items():
        try:
            found = ray.get(answer, timeout=timeout_s) if answer else {"error": "no node actor yet"}
            nodes[ray_node_id] = {"member": found.get("node_id") in members, **found}
        except ray.exceptions.RayError as error:
            nodes[ray_node_id] = {"error": str(error)}
    return {
        "name": name,
        "epoch": described["view"].epoch,
        "directory": {"pid": described["pid"]},
        "secret": described["secret"],
        "nodes": nodes,
    }


def is_drained(node: dict[str, Any]) -> bool:
    """Whether an entry of `status` is a node that was drained, and does not run any more."""
    return "drain" in node and "node_id" not in node


def stop(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
    """Stop all processes of a cluster, and remove its memory on every Ray node. Return False if no cluster ran."""
    try:
        directory = _directory(name)
    except PeerUnavailable:
        return False
    ray.get(directory.stop.remote(timeout_s), timeout=3 * timeout_s)
    ray.kill(directory, no_restart=True)
    until_s = time.monotonic() + timeout_s
    mine = f"raykv:{name}:"
    while time.monotonic() < until_s:
        actors = ray.util.list_named_actors(all_namespaces=True)
        if not any(actor["namespace"] == NAMESPACE and actor["name"].startswith(mine) for actor in actors):
            return True
        time.sleep(POLL_S)
    raise PeerUnavailable(f"actors of cluster {name!r} are still there after {timeout_s} s")


def upgrade(name: str = "default", *, timeout_s: float = 60.0) -> Iterator[dict[str, Any]]:
    """Restart all processes of a cluster with the code that is installed now, one node after the other.

    A node's memory stays, so the new process finds all chunks. A node starts empty only if the new version has another
    memory layout. While a node restarts, clients on its host can read, but their puts are skipped. The next node is
    restarted when this node is a member again.

    Yields:
        For each node {"node", "pid_before", "pid", "chunks_before", "recovered", "seconds"}. "recovered" is the number
        of chunks that the new process found. The last item is for the directory, and has no numbers of chunks.

    Raises:
        PeerUnavailable: No cluster of that name runs, or a node did not return in time. No further node is restarted.
    """
    for ray_node_id, before in status(name)["nodes"].items():
        if is_drained(before):
            continue
        if "pid" not in before:
            raise PeerUnavailable(f"node {ray_node_id} is not up ({before.get('error')}): no further node is restarted")
        began_s = time.monotonic()
        actor = ray.get_actor(node_name(name, ray_node_id), namespace=NAMESPACE)
        try:
            ray.get(actor.step_aside.remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise PeerUnavailable(f"node {ray_node_id} did not step aside: {error}") from error
        is_back = partial(_is_node_back, ray_node_id, before["pid"])
        after = _wait_until(is_back, name, began_s + timeout_s)["nodes"][ray_node_id]
        yield {
            "node": ray_node_id,
            "pid_before": before["pid"],
            "pid": after["pid"],
            "chunks_before": before.get("chunks", 0),
            "recovered": after.get("recovered", 0),
            "seconds": time.monotonic() - began_s,
        }
    began_s, pid = time.monotonic(), status(name)["directory"]["pid"]
    ray.kill(_directory(name), no_restart=False)
    found = _wait_until(partial(_is_directory_back, pid), name, began_s + timeout_s)
    yield {
        "node": "directory",
        "pid_before": pid,
        "pid": found["directory"]["pid"],
        "seconds": time.monotonic() - began_s,
    }


def drain(
    node: str, name: str = "default", *, nbytes_per_s: float = DRAIN_NBYTES_PER_S, timeout_s: float = 3600.0
) -> Iterator[dict[str, Any]]:
    """Move the chunks of a node to other nodes that have room, then stop the node and free its memory.

    The node serves reads until the end, but stores no more chunks. Chunks that eviction would remove last are moved
    first. The Ray node stays, without a raykv node, until `undrain`.

    Args:
        node: Id of the Ray node, or its first characters.
        name: Name of the cluster.
        nbytes_per_s: The node sends at most this many bytes a second.
        timeout_s: Time limit. After it, the drain goes on in the background.

    Yields:
        About every second what was done so far: the fields of `raykv.node.drain.Progress`. In the last item, "state" is
        "done", and "left" counts the chunks that are lost with the node.

    Raises:
        UsageError: The cluster has no such node, or several of them, or a field is wrong.
        PeerUnavailable: No cluster of that name runs, or the node is not drained within `timeout_s`.
    """
    if not 0 < nbytes_per_s < float("inf"):
        raise UsageError(f"field 'nbytes_per_s': {nbytes_per_s} must be above 0, and finite")
    ray_node_id, actor = _actor_of(node, name)
    until_s = time.monotonic() + timeout_s
    try:
        ray.get(actor.drain.remote(nbytes_per_s), timeout=timeout_s)
        while time.monotonic() < until_s:
            found = ray.get(actor.describe.remote(), timeout=timeout_s)
            if progress := found.get("drain"):
                yield progress
                if progress["state"] == "done" and "node_id" not in found:
                    return
            time.sleep(DRAIN_POLL_S)
    except ray.exceptions.RayError as error:
        raise PeerUnavailable(f"node {ray_node_id} does not answer: {error}") from error
    raise PeerUnavailable(f"node {ray_node_id} is not drained within {timeout_s} s; the drain goes on")


def undrain(node: str, name: str = "default", *, timeout_s: float = 60.0) -> None:
    """Start a drained node again, or end a drain that is still going on. A node that was drained starts empty.

    Raises:
        UsageError: The cluster has no such node, or several of them.
        PeerUnavailable: No cluster of that name runs, or the node did not return in time.
    """
    ray_node_id, actor = _actor_of(node, name)
    before = status(name)["nodes"][ray_node_id]
    ray.get(actor.step_aside.remote(), timeout=timeout_s)
    _wait_until(partial(_is_node_back, ray_node_id, before.get("pid")), name, time.monotonic() + timeout_s)


def _actor_of(node: str, name: str) -> tuple[str, Any]:
    """Return the id of the Ray node whose id begins with `node`, and its node actor."""
    _directory(name)  # raises PeerUnavailable if there is no cluster
    actors = {ray_node_id: actor for ray_node_id, actor in node_actors(name).items() if actor is not None}
    found = [ray_node_id for ray_node_id in actors if node and ray_node_id.startswith(node)]
    if len(found) != 1:
        raise UsageError(f"NODE {node!r} names {len(found)} nodes of: {', '.join(actors)}")
    return found[0], actors[found[0]]


def record(name: str = "default", *, seconds: float, every_s: float = 1.0) -> Iterator[list[TracedRequest]]:
    """Record the requests of the cluster for `seconds`, or until the caller stops iterating.

    Yields:
        Every `every_s` seconds, the requests since the last item, in order of time. Between two items, each node
        collects at most 16 MiB of requests, and drops further requests.

    Raises:
        PeerUnavailable: No cluster of that name runs.
    """
    until_s = time.monotonic() + seconds
    try:
        while True:
            left_s = until_s - time.monotonic()
            yield _fetch_records(name, left_s > 0)
            if left_s <= 0:
                return
            time.sleep(min(every_s, left_s))
    finally:
        _fetch_records(name, False)


def _fetch_records(name: str, on: bool) -> list[TracedRequest]:
    """Ask all nodes for the requests recorded since the last fetch, and turn recording on or off."""
    _directory(name)
    asked = [actor.record.remote(on) for actor in node_actors(name).values() if actor]
    requests: list[TracedRequest] = []
    for answer in asked:
        try:
            requests += ray.get(answer, timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayError:
            continue  # the node is being restarted, so the trace lacks its requests
    return sorted(requests, key=lambda each: each.at_s)


def _is_node_back(ray_node_id: str, old_pid: int, found: dict[str, Any]) -> bool:
    node = found["nodes"].get(ray_node_id, {})
    return bool(node.get("member")) and node["pid"] != old_pid


def _is_directory_back(old_pid: int, found: dict[str, Any]) -> bool:
    nodes = [node for node in found["nodes"].values() if not is_drained(node)]
    return found["directory"]["pid"] != old_pid and all(node.get("member") for node in nodes)


def _wait_until(is_ready: Callable[[dict[str, Any]], bool], name: str, until_s: float) -> dict[str, Any]:
    """Return the cluster's status once `is_ready` accepts the status. After `until_s`, raise PeerUnavailable.

    `until_s` is a time of the monotonic clock.
    """
    problem: object = "no answer"
    while time.monotonic() < until_s:
        try:
            found = status(name)
            if is_ready(found):
                return found
            problem = {each: node.get("error", "it does not know all members") for each, node in found["nodes"].items()}
        except (PeerUnavailable, ray.exceptions.RayError) as error:
            problem = error
        time.sleep(POLL_S)
    raise PeerUnavailable(f"cluster {name!r} is not ready in time: {problem}")


def find_address(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> str:
    """Return the address of the raykv node on this process's Ray node.

    Raises:
        PeerUnavailable: No cluster of that name runs, or it has no node on this Ray node.
    """
    ray_node_id = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(node_name(name, ray_node_id), namespace=NAMESPACE)
        address: str = ray.get(actor.describe.remote(), timeout=timeout_s)["local_address"]
        return address
    except (ValueError, ray.exceptions.RayError) as error:
        raise PeerUnavailable(f"no raykv node on this Ray node; run 'raykv up' ({error})") from error


def secret(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> str:
    """Return the cluster's secret as hexadecimal text, for clients outside Ray."""
    text: str = ray.get(_directory(name).secret.remote(), timeout=timeout_s)
    return text


def rotate_secret(name: str = "default", *, keep_former: bool = False, timeout_s: float = 60.0) -> Iterator[Stage]:
    """Replace the cluster's secret by a new one, in three steps. A rotation that was interrupted goes on.

    All nodes finish a step before the next one begins, so no request fails. Clients on a host with a node learn the new
    secret from the node.

    Args:
        name: Name of the cluster.
        keep_former: Whether to leave out the last step. Until then the former secret is accepted too, so that clients
            elsewhere can be given the new one.
        timeout_s: Time limit of one step.

    Yields:
        The stage, after each step that all nodes have finished.

    Raises:
        PeerUnavailable: No cluster of that name runs, or not all nodes have finished a step in time. Try again: the
            rotation goes on where it stands.
    """
    last = Stage.USED if keep_former else Stage.STEADY
    stage = _await_secrets(name, time.monotonic() + timeout_s)
    while stage is not last or last is Stage.STEADY:
        try:
            ray.get(_directory(name).rotate.remote(), timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise PeerUnavailable(f"the directory cannot rotate the secret now: {error}") from error
        stage = _await_secrets(name, time.monotonic() + timeout_s)
        yield stage
        if stage is last:
            return


def _await_secrets(name: str, until_s: float) -> Stage:
    """Wait until all members use the newest secrets. Return the stage of the rotation."""
    found = _wait_until(lambda found: bool(found["nodes"]) and not found["secret"]["behind"], name, until_s)
    return Stage(found["secret"]["stage"])


def _directory(name: str) -> Any:
    try:
        return ray.get_actor(directory_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise PeerUnavailable(f"no raykv cluster {name!r} runs here; start one with 'raykv up'") from error
