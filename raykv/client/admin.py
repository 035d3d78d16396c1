"""What a client says of namespaces and chunks, beside reading and writing them: configs, hints, and what there is."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from raykv.client.router import Router
from raykv.client.slot_pool import QuotaGroup
from raykv.client.why import namespaces, reasons_of
from raykv.config import NamespaceConfig
from raykv.errors import PeerUnavailable, RayKVError, UsageError
from raykv.metrics import BUCKETS, quantiles
from raykv.protocol import chunk_keys, messages
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import View
from raykv.types import KeyArray, NodeId


def configure(
    router: Router, namespace: Namespace, fields: dict[str, Any] | None, deadline_s: float
) -> tuple[list[NodeId], int]:
    """Change fields of the config of a namespace's quota group, or drop it (None): at the directory, then on every node.

    Returns:
        The nodes that have taken note, and how many chunks went from them when it was dropped last. The others hear of
        it with their next heartbeat.

    Raises:
        UsageError: A field is wrong, and which.
        PeerUnavailable: No node answers, or the directory is away: nothing was changed.
    """
    text = b"{}" if fields is None else msgspec.json.encode(fields)
    request = messages.Configure(QuotaGroup.of(namespace).text, text, fields is None)
    problem: RayKVError = PeerUnavailable("the cluster has no nodes")
    members = [member.node_id for member in router.refresh(deadline_s).members]
    mine = None if router.local is None else router.local.attached.node_id
    members.sort(key=lambda name: name != mine)  # our own node is asked first
    for first in members:
        try:
            answer = messages.expect(messages.Configured, router.call(first, request, deadline_s))
            if not answer.problem:
                break
            problem = PeerUnavailable(answer.problem)
        except UsageError:
            raise
        except RayKVError as error:
            problem = error
    else:
        raise PeerUnavailable(f"no node could do that: {problem}")
    adopt = messages.Adopt(answer.register, namespace.group.digest)
    work = {name: partial(router.call, name, adopt, deadline_s) for name in members if name != first}
    counts = {
        name: each.count
        for name, each in router.in_parallel(work, deadline_s).items()
        if isinstance(each, messages.Count)
    }
    return [first, *counts], answer.count + sum(counts.values())


def report(router: Router, group: bytes, deadline_s: float) -> None:
    """Ask why what was missed lately was not there, and tell a node: our own, or any. Never raises."""
    misses, absent, gets, puts = router.tally(group).take()
    if not (misses or absent or any(gets) or any(puts)):
        return
    if absent:
        misses.update(reasons_of(router, absent, deadline_s))
    members = sorted(router.view(deadline_s).members, key=lambda member: member.host != router.host)
    request = messages.Report(group, dict(misses), tuple(gets), tuple(puts))
    for member in members:
        try:
            router.call(member.node_id, request, deadline_s)
            return
        except RayKVError:
            continue  # these counts are lost if nobody answers


def list_namespaces(router: Router, deadline_s: float) -> list[dict[str, Any]]:
    """Every quota group that some node knows: see `Client.namespaces`."""
    said, silent = namespaces(router, deadline_s)
    return [{**each, "silent": silent} for each in gathered(said)]


def gathered(said: Mapping[NodeId, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What nodes say of each quota group (`Namespaces.list`), as one entry an quota group."""
    found: dict[str, dict[str, Any]] = {}
    for node, groups in sorted(said.items()):
        for text, theirs in groups.items():
            whole = found.setdefault(
                text,
                {
                    "namespace": Namespace.model_validate_json(text),
                    "config": NamespaceConfig(),
                    "chunks": 0,
                    "used_nbytes": 0,
                    "below_nbytes": Counter(),
                    "reads": 0,
                    "departures": Counter(),
                    "misses": Counter(),
                    "get_counts": [0] * BUCKETS,
                    "put_counts": [0] * BUCKETS,
                    "nodes": {},
                },
            )
            if theirs["config"]:
                whole["config"] = NamespaceConfig.load(theirs["config"])
            for count in ("chunks", "used_nbytes", "reads"):
                whole[count] += theirs[count]
            for counts in ("departures", "below_nbytes", "misses"):
                whole[counts].update(theirs.get(counts, {}))
            for counts in ("get_counts", "put_counts"):
                whole[counts] = [ours + more for ours, more in zip(whole[counts], theirs[counts], strict=True)]
            whole["nodes"][node] = {name: value for name, value in theirs.items() if name != "config"}
    for whole in found.values():
        whole |= {name: dict(whole[name]) for name in ("departures", "below_nbytes", "misses")}
        whole["get_times"], whole["put_times"] = (quantiles(whole.pop(f"{kind}_counts")) for kind in ("get", "put"))
    return [found[text] for text in sorted(found)]


def hint(
    router: Router,
    keys: KeyArray,
    deadline_s: float,
    *,
    ttl_s: float | None = None,
    priority: int | None = None,
    ended: bool = False,
    touch: bool = False,
    output_tokens: int | None = None,
) -> int:
    """Tell the holders of chunks what is known of them. Returns how many copies of them were there."""
    shares = _holders(router, keys, router.view(deadline_s), deadline_s)
    work = {
        name: partial(
            router.call,
            name,
            messages.Hint(chunk_keys.to_bytes(keys[places]), ttl_s, priority, ended, touch, output_tokens),
            deadline_s,
        )
        for name, places in shares.items()
    }
    answers = router.in_parallel(work, deadline_s)
    return sum(answer.count for answer in answers.values() if isinstance(answer, messages.Count))


def _holders(router: Router, keys: KeyArray, view: View, deadline_s: float) -> dict[NodeId, list[int]]:
    """Places of the keys by each of their holders; this host's node is asked for all."""
    choices, numbers, _ = router.located(keys, deadline_s)
    members = {member.node_id for member in view.members}
    shares: dict[NodeId, list[int]] = {}
    if router.local is not None and len(keys):
        shares[router.local.attached.node_id] = list(range(len(keys)))
    for number, holders in enumerate(choices):
        places: list[int] = np.flatnonzero(numbers == number).tolist()
        for name in holders:
            if places and name in members and (router.local is None or name != router.local.attached.node_id):
                shares.setdefault(name, []).extend(places)
    return shares
