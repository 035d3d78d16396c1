"""Start, stop and look at a raykv cluster on the Ray cluster that this process has joined."""

import secrets
import time
from typing import Any, Final

import ray

from raykv.cluster.actors import NAMESPACE, DirectoryActor, directory_name, living_ray_nodes, node_name
from raykv.config import ClusterConfig
from raykv.errors import ConfigError, PeerUnavailable

CALL_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05


def start(config: ClusterConfig | None = None, *, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
    """Put a node on every Ray node, now and whenever one joins, and wait until all are members.

    Safe to call again: a running cluster of the same configuration is left as it is.

    Args:
        config: What to start. Its fields may also be given by name.
        timeout_s: How long to wait for the nodes.

    Returns:
        As `status`.

    Raises:
        ConfigError: A cluster of this name runs with another configuration (names the fields); a field is wrong; or a
            node cannot serve it, for want of memory say: then `stop` it, and start with another.
        PeerUnavailable: The nodes did not come up in time; says which, and why if Ray knows.
    """
    wanted = ClusterConfig.load({**(config.model_dump(exclude_unset=True) if config else {}), **fields})
    directory = (
        ray.remote(DirectoryActor)
        .options(
            name=directory_name(wanted.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=32,
        )
        .remote(wanted, secrets.token_bytes(32))
    )
    running = ray.get(directory.describe.remote(), timeout=timeout_s)["config"]
    differing = [name for name in ClusterConfig.model_fields if getattr(running, name) != getattr(wanted, name)]
    if differing:
        raise ConfigError(
            f"cluster {wanted.name!r} already runs with other values of: {', '.join(differing)}; "
            "run 'raykv down' first, or start with another name"
        )
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        found = status(wanted.name)
        nodes = found["nodes"].values()
        refused = [node["error"] for node in nodes if "pid" in node and "error" in node]
        if refused:
            raise ConfigError(f"a node cannot serve this configuration: {refused[0]}")
        if nodes and all(node.get("member") for node in nodes):
            return found
        time.sleep(POLL_S)
    problems = {name: node.get("error", "not a member yet") for name, node in status(wanted.name)["nodes"].items()}
    raise PeerUnavailable(f"nodes not up within {timeout_s} s: {problems}")


def status(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """What runs.

    Returns:
        {"name", "epoch", "directory": {"pid"}, "nodes": {ray node id: {"member": bool, "pid", figures...} or
        {"error": text}}}.

    Raises:
        PeerUnavailable: No cluster of that name runs.
    """
    described = ray.get(_directory(name).describe.remote(), timeout=timeout_s)
    members = {member.node_id for member in described["view"].members}
    nodes: dict[str, dict[str, Any]] = {}
    asked = {}
    for ray_node_id in sorted(living_ray_nodes()):
        try:
            asked[ray_node_id] = ray.get_actor(node_name(name, ray_node_id), namespace=NAMESPACE).describe.remote()
        except ValueError:
            nodes[ray_node_id] = {"error": "no node actor yet"}
    for ray_node_id, answer in asked.items():
        try:
            figures = ray.get(answer, timeout=timeout_s)
            nodes[ray_node_id] = {"member": figures.get("node_id") in members, **figures}
        except ray.exceptions.RayError as error:
            nodes[ray_node_id] = {"error": str(error)}
    return {
        "name": name,
        "epoch": described["view"].epoch,
        "directory": {"pid": described["pid"]},
        "nodes": nodes,
    }


def stop(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
    """End a cluster: its processes and its memory. False if none of that name ran."""
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


def find_address(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, str]:
    """How to reach the node on this process's own Ray node, as fields of ClientConfig.

    Raises:
        PeerUnavailable: No cluster of that name runs, or it has no node here.
    """
    ray_node_id = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(node_name(name, ray_node_id), namespace=NAMESPACE)
        return {"address": ray.get(actor.describe.remote(), timeout=timeout_s)["local_address"]}
    except (ValueError, ray.exceptions.RayError) as error:
        raise PeerUnavailable(f"no raykv node on this Ray node; run 'raykv up' ({error})") from error


def secret(name: str = "default", *, timeout_s: float = CALL_TIMEOUT_S) -> str:
    """The cluster's secret, as hexadecimal text, for clients outside Ray."""
    text: str = ray.get(_directory(name).secret.remote(), timeout=timeout_s)
    return text


def _directory(name: str) -> Any:
    try:
        return ray.get_actor(directory_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise PeerUnavailable(f"no raykv cluster {name!r} runs here; start one with 'raykv up'") from error
