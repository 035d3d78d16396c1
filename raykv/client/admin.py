"""Calls of a client that move no chunk bytes: keys, configs, hints, statistics, reasons of misses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from raykv.client.arguments import (
    Keys,
    Tokens,
    integer_in,
    key_array,
    list_of_names,
    named_keys,
    number_in,
    priority_of,
    token_ids,
)
from raykv.client.key_sources import ArrayKeys, KeySource, NamedKeys, TokenKeys
from raykv.client.router import Router
from raykv.client.slot_pool import QuotaGroup
from raykv.client.why import Inquiry, Why, namespaces, reasons_of
from raykv.config import NamespaceConfig
from raykv.errors import PeerUnavailable, RayKVError, UsageError
from raykv.metrics import BUCKETS, ClientMetrics, quantiles
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import expect
from raykv.protocol.hints import MAX_TTL_S, MOST_OUTPUT_TOKENS
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import View
from raykv.types import KeyArray, NodeId


class AdminCalls:
    """The part of `Client` that moves no chunk bytes.

    Attributes:
        namespace: What the chunks were computed under.
        router: The connections, shared with the clients made by `using`.
    """

    def __init__(self, namespace: Namespace, router: Router) -> None:
        self.namespace = namespace
        self._digest, self.router = namespace.digest, router

    @cached_property
    def _group(self) -> QuotaGroup:
        return QuotaGroup.of(self.namespace)

    @cached_property
    def _metrics(self) -> ClientMetrics:
        return self.router.metrics(self._group.digest)

    # -- keys -------------------------------------------------------------------------------------------------------

    def keys(self, names: Iterable[bytes | str]) -> KeyArray:
        """Keys, shape [n, 2], of objects with names of any length (an engine's block hashes, say)."""
        return named_keys(self._digest, names)

    def key(self, name: bytes | str) -> bytes:
        """The key of one object: 16 bytes, a row of what `keys` returns."""
        return chunk_keys.to_bytes(self.keys([name]))

    def chain(self, tokens: Tokens) -> KeyArray:
        """Keys, shape [n, 2], of the full chunks of a prompt, `namespace.chunk_tokens` tokens each."""
        return chunk_keys.chain(self._digest, token_ids(tokens), self.namespace.chunk_tokens)

    def _as_keys(self, keys: Keys) -> KeyArray:
        return key_array("keys", keys) if isinstance(keys, np.ndarray) else self.keys(keys)

    # -- configs ----------------------------------------------------------------------------------------------------

    def limit(self, capacity_nbytes: int, *, timeout_s: float | None = None) -> int:
        """Bound what this namespace, with all its salts and adapters, may use on each node.

        Args:
            capacity_nbytes: Bytes of slots on one node; 0 for no bound but the arena. What is above it is evicted when
                the next chunks are stored.

        Returns:
            How many nodes follow it by now; the others do after their next heartbeat.
        """
        capacity_nbytes = integer_in("capacity_nbytes", capacity_nbytes, 0, (1 << 63) - 1)
        return self.configure(dram_quota_nbytes=capacity_nbytes or None, timeout_s=timeout_s)

    def configure(self, *, timeout_s: float | None = None, **fields: Any) -> int:
        """Change fields of the config of this namespace, with all its salts and adapters, while the cluster runs.

        Args:
            fields: Those of `NamespaceConfig`; the others stay. A policy goes on with the chunks that are stored; a
                time to live holds for chunks stored from now on; what is above a quota is evicted at once.

        Returns:
            How many nodes follow it by now; the others, and nodes that join later, do after their next heartbeat.

        Raises:
            ConfigError: A field is wrong or unknown. Names it.
            PeerUnavailable: The directory is away. Nothing was changed.
        """
        return len(_configure(self.router, self._group, fields, self.router.deadline(timeout_s))[0])

    def drop_namespace(self, *, timeout_s: float | None = None) -> int:
        """Drop all chunks of this namespace, with all its salts and adapters, on every node and tier; and its config.

        Pinned chunks are dropped when they are unpinned. Later puts make the namespace again, and empty.

        Returns:
            How many chunks were dropped by now. Nodes that are away drop theirs when they are back.

        Raises:
            PeerUnavailable: The directory is away. Nothing was dropped.
        """
        return _configure(self.router, self._group, None, self.router.deadline(timeout_s))[1]

    def namespaces(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Every namespace that a node knows (without salt and adapter), configured or merely in use.

        Returns:
            Of each {"namespace": Namespace, "config": NamespaceConfig, "chunks", "used_nbytes", "below_nbytes" (by
            tier), "reads" (of its chunks, by all clients), "requests", "served_nbytes", "departures" (by reason),
            "misses" (by reason) and "get_times", "put_times" (as clients report now and then), "nodes": the same of
            each node, "silent": nodes that did not answer, and why}.
        """
        deadline_s = self.router.deadline(timeout_s)
        report(self.router, self.namespace, deadline_s)
        listed, silent = namespaces(self.router, deadline_s)
        return [{**each, "silent": silent} for each in merge_namespaces(listed)]

    # -- chunks -----------------------------------------------------------------------------------------------------

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Drop chunks on every node. Returns how many copies were dropped.

        Pinned chunks are dropped when they are unpinned; copies on nodes that are away stay.
        """
        request = messages.Delete(chunk_keys.to_bytes(self._as_keys(keys)), group=self._group.digest)
        answers = self.router.ask_all(request, self.router.deadline(timeout_s))
        return sum(answer.count for answer in answers.values() if isinstance(answer, messages.Count))

    def hint(
        self,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        priority: int | None = None,
        output_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Give the holders of chunks hints about their future, or about their use.

        Args:
            ttl_s: They expire after this time; 0: never. None: as before.
            priority: -100 to 100; higher priorities are evicted later. None: as before.
            output_tokens: The request that read or stored them has ended, and produced this many tokens. The policy
                `density` learns from it which chunks are read again. The vLLM connector sends it by itself.

        Returns:
            How many copies there were on the nodes that answered.
        """
        if ttl_s is not None:
            ttl_s = number_in("ttl_s", ttl_s, 0.0, MAX_TTL_S)
        if priority is not None:
            priority = priority_of(priority)
        if output_tokens is not None:
            output_tokens = integer_in("output_tokens", output_tokens, 0, MOST_OUTPUT_TOKENS)
        return self._hint(keys, timeout_s, ttl_s=ttl_s, priority=priority, output_tokens=output_tokens)

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Make chunks count as read now. Returns how many copies there were."""
        return self._hint(keys, timeout_s, touch=True)

    def session_end(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """These chunks will hardly be read soon: they are the first to leave memory, for an SSD if there is one.

        Nothing is dropped. The next read of a chunk (by another session, say) makes it like the others.

        Returns:
            How many copies there were.
        """
        return self._hint(keys, timeout_s, ended=True)

    def _hint(self, keys: Keys, timeout_s: float | None, **fields: Any) -> int:
        router, found = self.router, self._as_keys(keys)
        deadline_s = router.deadline(timeout_s)

        def request(places: Sequence[int]) -> messages.Hint:
            return messages.Hint(chunk_keys.to_bytes(found[places]), group=self._group.digest, **fields)

        work = {
            name: partial(router.call, name, request(places), deadline_s)
            for name, places in _holders(router, found, self._group.digest, deadline_s).items()
        }
        answers = router.parallel.run(work, deadline_s)
        return sum(answer.count for answer in answers.values() if isinstance(answer, messages.Count))

    def why(
        self, keys: Keys | None = None, *, tokens: Tokens | None = None, timeout_s: float | None = None
    ) -> list[Why]:
        """What became of chunks, one entry each: where they are, or why they are not here. Asks all members.

        Args:
            keys: A list of names, or an array from `keys` or `chain`. Only for names and tokens, other namespaces are
                searched too: an array does not say what it was made from.
            tokens: In place of keys: a prompt, for its full chunks.
            timeout_s: Chunks that were not asked about by then get the reason "not_asked_in_time".

        Raises:
            UsageError: Neither keys nor tokens, or both.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("fields 'keys' and 'tokens': give one of them")
        deadline_s = self.router.deadline(timeout_s)
        source: KeySource
        if tokens is not None:
            source = TokenKeys(self.namespace, tokens)
        elif isinstance(keys, np.ndarray):
            source = ArrayKeys(keys)
        else:
            source = NamedKeys(self.namespace, list_of_names(keys))
        return Inquiry(self.router, self.namespace, source, deadline_s).run()

    # -- about ------------------------------------------------------------------------------------------------------

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What every member reports, and the view: {"epoch", "nodes": {node_id: {...} or {"error": ...}}}."""
        router, deadline_s = self.router, self.router.deadline(timeout_s)
        report(router, self.namespace, deadline_s)
        view, answers = router.view(deadline_s), router.ask_all(messages.GetStats(), deadline_s)
        nodes = {
            name: msgspec.json.decode(answer.stats) if isinstance(answer, messages.Stats) else {"error": str(answer)}
            for name, answer in answers.items()
            if view.member(name) is not None
        }
        return {"epoch": view.epoch, "nodes": nodes}

    def view(self) -> View:
        """The members of the cluster, and its ring, as the nearest node knows them now."""
        return self.router.refresh(self.router.deadline(None))

    def close(self) -> None:
        """Close all connections, also of the clients made by `using`. Leases end."""
        self.router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _configure(
    router: Router, group: QuotaGroup, fields: dict[str, Any] | None, deadline_s: float
) -> tuple[list[NodeId], int]:
    """Change fields of a quota group's config, or drop the group (None): at the directory, then on every node.

    Returns:
        The nodes that follow it by now, and how many chunks they dropped when it was dropped last.
    """
    try:
        text = b"{}" if fields is None else msgspec.json.encode(fields, enc_hook=_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"fields {', '.join(fields or ())}: {error}; give numbers, text or None") from None
    request = messages.Configure(group.text, text, fields is None, group=group.digest)
    problem: RayKVError = PeerUnavailable("the cluster has no nodes")
    router.refresh(deadline_s)
    names = router.node_ids(deadline_s)
    for first in names:
        try:
            answer = expect(messages.Configured, router.call(first, request, deadline_s))
            if not answer.problem:
                break
            problem = PeerUnavailable(answer.problem)
        except UsageError:
            raise
        except RayKVError as error:
            problem = error
    else:
        raise PeerUnavailable(f"no node could do that: {problem}")
    adopt = messages.Adopt(answer.registry, group=group.digest)
    work = {name: partial(router.call, name, adopt, deadline_s) for name in names if name != first}
    counts = {
        name: each.count
        for name, each in router.parallel.run(work, deadline_s).items()
        if isinstance(each, messages.Count)
    }
    return [first, *counts], answer.count + sum(counts.values())


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is not a value of a config")


def report(router: Router, namespace: Namespace, deadline_s: float) -> None:
    """Ask why the latest misses happened, and report them to a node: this host's, or any. Never raises."""
    group = namespace.group.digest
    misses, absent, gets, puts = router.metrics(group).reset()
    if not (misses or absent or any(gets) or any(puts)):
        return
    if absent:
        misses.update(reasons_of(router, namespace, absent, deadline_s))
    request = messages.Report(dict(misses), tuple(gets), tuple(puts), group=group)
    for name in router.node_ids(deadline_s):
        try:
            router.call(name, request, deadline_s)
            return
        except RayKVError:
            continue  # these counts are lost if no node answers


def merge_namespaces(listed: Mapping[NodeId, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What nodes say of each quota group (`NamespacesAre`), as one entry a quota group."""
    found: dict[str, dict[str, Any]] = {}
    for node, groups in sorted(listed.items()):
        for text, theirs in groups.items():
            whole = found.setdefault(
                text,
                {
                    "namespace": Namespace.model_validate_json(text),
                    "config": NamespaceConfig(),
                    **dict.fromkeys(_SUMS, 0),
                    **{name: Counter[str]() for name in _COUNTERS},
                    "get_counts": [0] * BUCKETS,
                    "put_counts": [0] * BUCKETS,
                    "nodes": {},
                },
            )
            if theirs["config"]:
                whole["config"] = NamespaceConfig.load(theirs["config"])
            for name in _SUMS:
                whole[name] += theirs.get(name, 0)
            for name in _COUNTERS:
                whole[name].update(theirs.get(name, {}))
            for name in ("get_counts", "put_counts"):
                whole[name] = [ours + more for ours, more in zip(whole[name], theirs[name], strict=True)]
            whole["nodes"][node] = {name: value for name, value in theirs.items() if name != "config"}
    for whole in found.values():
        whole |= {name: dict(whole[name]) for name in _COUNTERS}
        whole["get_times"], whole["put_times"] = (quantiles(whole.pop(f"{kind}_counts")) for kind in ("get", "put"))
    return [found[text] for text in sorted(found)]


_SUMS = ("chunks", "used_nbytes", "reads", "requests", "served_nbytes")
_COUNTERS = ("departures", "below_nbytes", "misses")


def _holders(router: Router, keys: KeyArray, group: bytes, deadline_s: float) -> dict[NodeId, Sequence[int]]:
    """Places of the keys by each of their holders; this host's node is asked for all."""
    found = router.locate(keys, deadline_s, group=group)
    members = {member.node_id for member in router.view(deadline_s).members}
    shares: dict[NodeId, list[int]] = {}
    for number, holders in enumerate(found.choices):
        places: list[int] = np.flatnonzero(found.numbers == number).tolist()
        for name in holders:
            if places and name in members:
                shares.setdefault(name, []).extend(places)
    if router.local_id is not None and len(keys):
        shares[router.local_id] = list(range(len(keys)))
    return {name: sorted(places) for name, places in shares.items()}
