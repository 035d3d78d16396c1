"""Calls of a client that move no chunk bytes: keys, configs, hints, statistics, reasons of misses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np

from raykv.client import request_trail
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
from raykv.client.fetcher import by_node
from raykv.client.request_trail import TrailLine
from raykv.client.router import Router
from raykv.client.why import Derive, Inquiry, PromptKeys, Why, reasons_of, split
from raykv.config import HIGHEST_PRIORITY, NamespaceConfig
from raykv.errors import RayKVError, UsageError
from raykv.metrics import Histogram
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import expect
from raykv.protocol.hints import MAX_TTL_S, MOST_OUTPUT_TOKENS
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import View
from raykv.protocol.request_trail import MIN_ASKED, TrailEntry
from raykv.types import KeyArray, NodeId


class AdminCalls:
    """The part of `Client` that moves no chunk bytes.

    Attributes:
        namespace: The namespace of all keys of this client.
        router: The connections, shared with the clients made by `using`.
    """

    def __init__(self, namespace: Namespace, router: Router) -> None:
        self.namespace, self.router = namespace, router
        self._digest, self._group = namespace.digest, namespace.group
        self._metrics = router.metrics(self._group.digest)

    # -- keys -------------------------------------------------------------------------------------------------------

    def keys(self, names: Iterable[bytes | str]) -> KeyArray:
        """Derive keys, shape [n, 2], from object names of any length (an engine's block hashes, for example)."""
        return named_keys(self._digest, names)

    def key(self, name: bytes | str) -> bytes:
        """Derive the 16-byte key of one object from its name."""
        try:
            return chunk_keys.named_one(self._digest, name)
        except (UnicodeEncodeError, TypeError, BufferError):
            return chunk_keys.to_bytes(self.keys([name]))  # raises a UsageError

    def chain(self, tokens: Tokens) -> KeyArray:
        """Derive keys, shape [n, 2], for the full chunks of a prompt. A chunk has `namespace.chunk_tokens` tokens."""
        return chunk_keys.chain(self._digest, token_ids(tokens), self.namespace.chunk_tokens)

    def _as_keys(self, keys: Keys) -> KeyArray:
        return key_array("keys", keys) if isinstance(keys, np.ndarray) else self.keys(keys)

    # -- configs ----------------------------------------------------------------------------------------------------

    def configure(self, *, timeout_s: float | None = None, **fields: Any) -> int:
        """Change this namespace's config while the cluster runs. The config applies to all salts and adapters.

        Args:
            fields: Fields of `NamespaceConfig`. Fields that are not given stay unchanged. A new policy takes over the
                stored chunks. A new TTL applies to later puts. Chunks above a new quota are evicted.

        Returns:
            The number of nodes that apply the change already. Other nodes apply it after their next heartbeat.

        Raises:
            ConfigError: A field is wrong or unknown. The message names the field.
            PeerUnavailable: The directory does not answer. Nothing was changed.
        """
        return len(_configure(self.router, self._group, fields, self.router.deadline(timeout_s)))

    def drop_namespace(self, *, timeout_s: float | None = None) -> int:
        """Delete this namespace's config, and its chunks on every node and tier, for all salts and adapters.

        Pinned chunks are dropped when they are unpinned. A later put creates the namespace again.

        Returns:
            The number of copies dropped so far. Copies in memory and on an SSD count separately. A node that is down
            drops its copies when it is up again.

        Raises:
            PeerUnavailable: The directory does not answer. Nothing was dropped.
        """
        return sum(_configure(self.router, self._group, None, self.router.deadline(timeout_s)))

    def namespaces(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """List the namespaces that the nodes know, without salts and adapters.

        Returns:
            One dict per namespace, with these fields:

            * "namespace": the Namespace; "config": its NamespaceConfig.
            * "chunks", "used_nbytes": number and bytes of the chunks in memory.
            * "below_nbytes": bytes below memory, by tier (SSD and file).
            * "reads": number of reads of chunks in memory.
            * "requests", "served_nbytes": number of requests, and bytes in the answers.
            * "departures": number of removed chunks, by reason.
            * "misses" (by reason), "get_times", "put_times": what clients report every few seconds.
            * "nodes": the counters of each node.
            * "silent": the error of each node that did not answer.
        """
        return merge_namespaces(self._node_stats(self.router.deadline(timeout_s)))

    # -- chunks -----------------------------------------------------------------------------------------------------

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Drop chunks on every node. A node that does not answer keeps its copies.

        Pinned chunks are dropped when they are unpinned.

        Returns:
            The sum of one count per node: its copies in memory or its copies below memory, whichever are more.
        """
        request = messages.Delete(chunk_keys.to_bytes(self._as_keys(keys)), group=self._group.digest)
        return sum(_counts(self.router.ask_all(request, self.router.deadline(timeout_s))))

    def hint(
        self,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        priority: int | None = None,
        output_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Give hints about stored chunks to the nodes that hold them.

        Args:
            ttl_s: The chunks expire after this time. 0: never. None: no change.
            priority: -100 to 100. Higher priorities are evicted later. None: no change.
            output_tokens: Number of output tokens of the request that had these chunks and has ended. The policy
                `density` learns from this hint which chunks are read again. The vLLM connector sends this hint.

        Returns:
            The number of copies in memory on the nodes that answered.
        """
        if ttl_s is not None:
            ttl_s = number_in("ttl_s", ttl_s, 0.0, MAX_TTL_S)
        if priority is not None:
            priority = priority_of(priority)
        if output_tokens is not None:
            output_tokens = integer_in("output_tokens", output_tokens, 0, MOST_OUTPUT_TOKENS)
        return self._hint(keys, timeout_s, ttl_s=ttl_s, priority=priority, output_tokens=output_tokens)

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Count one read of each chunk now. Returns the number of copies in memory on the nodes that answered."""
        return self._hint(keys, timeout_s, touch=True)

    def retain(
        self, keys: Keys, *, ttl_s: float, priority: int = HIGHEST_PRIORITY, timeout_s: float | None = None
    ) -> int:
        """Keep stored chunks for `ttl_s` seconds: they do not expire, and have at least this priority.

        A later expiry and a higher priority stay unchanged, so this call does no harm to chunks that other requests
        use. After `ttl_s`, the chunks have their earlier priority again. A node that needs room evicts retained chunks
        if no chunk of a lower priority is left.

        Args:
            ttl_s: More than 0, at most a year.
            priority: -100 to 100.

        Returns:
            The number of copies in memory on the nodes that answered.
        """
        seconds = number_in("ttl_s", ttl_s, 0.0, MAX_TTL_S)
        if not seconds:
            raise UsageError("field 'ttl_s': 0 would end at once; give the seconds for which to keep the chunks")
        return self._hint(keys, timeout_s, retain=(seconds, priority_of(priority)))

    def session_end(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Mark the chunks of a session that has ended. A node that needs room evicts or demotes marked chunks first.

        This call itself drops nothing. The next read of a chunk removes its mark.

        Returns:
            The number of copies in memory on the nodes that answered.
        """
        return self._hint(keys, timeout_s, ended=True)

    def _hint(self, keys: Keys, timeout_s: float | None, **fields: Any) -> int:
        router, found = self.router, self._as_keys(keys)
        deadline_s = router.deadline(timeout_s)
        located = router.locate(found, deadline_s, group=self._group.digest)
        shares = by_node((place, node) for place, holders in enumerate(located.holders) for node in holders)
        if router.local_id is not None and len(found):
            shares[router.local_id] = [*range(len(found))]  # owners may not know this node's newest chunks
        requests = {
            name: messages.Hint(chunk_keys.to_bytes(found[places]), group=self._group.digest, **fields)
            for name, places in shares.items()
        }
        return sum(_counts(router.call_each(requests, deadline_s)))

    def why(
        self, keys: Keys | None = None, *, tokens: Tokens | None = None, timeout_s: float | None = None
    ) -> list[Why]:
        """Explain for each chunk where it is, or why no node has it. Asks all members.

        Args:
            keys: A list of names, or an array that the method `keys` or `chain` returned. For an array, only this
                namespace is searched. For names, other namespaces are searched too.
            tokens: A prompt, in place of `keys`. The call explains the full chunks of the prompt, and searches other
                namespaces too.
            timeout_s: Chunks that are not looked up within this time get the reason "not_asked_in_time".

        Raises:
            UsageError: Both `keys` and `tokens` are given, or neither.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("fields 'keys' and 'tokens': give one of them")
        deadline_s = self.router.deadline(timeout_s)
        derive: Derive
        if tokens is not None:
            ids, size = token_ids(tokens), self.namespace.chunk_tokens
            count, derive = len(ids) // size, PromptKeys(ids, size)
        else:
            given = key_array("keys", keys) if isinstance(keys, np.ndarray) else list_of_names(keys)
            count, derive = len(given), partial(_derived, given)
        elsewhere = not isinstance(keys, np.ndarray)
        return Inquiry(self.router, self.namespace, derive, elsewhere=elsewhere, deadline_s=deadline_s).run(count)

    def trail(self, request_id: str, *, timeout_s: float | None = None) -> list[TrailLine]:
        """Return what routers and engines say of a request, in the order of time. Asks all members.

        Args:
            request_id: The id that the user knows, or a part of it, at least 4 characters.

        Raises:
            UsageError: `request_id` is too short, or longer than 256 characters.
        """
        if not MIN_ASKED <= len(request_id) <= 256:
            raise UsageError(f"field 'request_id': {len(request_id)} characters; give {MIN_ASKED} to 256 of the id")
        return request_trail.read(self.router, self.namespace, request_id, self.router.deadline(timeout_s))

    def add_to_trail(self, entries: list[TrailEntry]) -> None:
        """Send sentences about requests to a node, at most 256: see `TrailSender`. Raises RayKVError."""
        self.router.ask_any(messages.AddToTrail(entries), self.router.deadline(None))

    # -- statistics -------------------------------------------------------------------------------------------------

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the keys "epoch" (of the view), "nodes", "tripped_peers" and "data_paths".

        "nodes" maps each node to its counters, or to {"error": ...}.
        "tripped_peers" maps the address of each node that this client leaves alone to the seconds until it is asked.
        "data_paths" has the state of each data path. For RDMA: "over_tcp" maps each node that is read over TCP, because
        RDMA to it has failed, to the reason; "ports" has the rate of each port, and whether it is in use. For TCP:
        "rails" has the same of each pair of NICs, by node, if there are several.
        """
        deadline_s = self.router.deadline(timeout_s)
        nodes, view = self._node_stats(deadline_s), self.router.view(deadline_s)
        members = {name: nodes[name] for name in nodes if view.member(name) is not None}
        tripped, paths = self.router.pool.tripped(), self.router.paths.stats()
        return {"epoch": view.epoch, "nodes": members, "tripped_peers": tripped, "data_paths": paths}

    def _node_stats(self, deadline_s: float) -> dict[NodeId, dict[str, Any]]:
        """Return the counters of all members, and of this host's node, which may not be a member yet."""
        report(self.router, self.namespace, deadline_s)
        return self.router.stats(deadline_s)

    def view(self) -> View:
        """Fetch the current view (members and ring) from this host's node, or from another node."""
        return self.router.refresh(self.router.deadline(None))

    def close(self) -> None:
        """Close the connections of this client and of all clients made by `using`. Leases end."""
        self.router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _configure(router: Router, group: Namespace, fields: dict[str, Any] | None, deadline_s: float) -> list[int]:
    """Change a quota group's config at the directory, then on every node. `fields` None: drop the group.

    Returns:
        For each node that applies the change already, the number of chunks that it dropped.
    """
    try:
        text = None if fields is None else msgspec.json.encode(fields, enc_hook=_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"fields {', '.join(fields or ())}: {error}; give numbers, text or None") from None
    request = messages.Configure(group.model_dump_json(exclude_defaults=True).encode(), text, group=group.digest)
    router.refresh(deadline_s)
    answer = expect(messages.Configured, router.ask_any(request, deadline_s))
    return _counts(router.ask_all(messages.Adopt(answer.registry, group=group.digest), deadline_s))


def _counts(answers: Mapping[NodeId, messages.Answer | RayKVError]) -> list[int]:
    """Return the count in each answer. Errors are left out."""
    return [answer.count for answer in answers.values() if isinstance(answer, messages.Count)]


def _derived(keys: KeyArray | Sequence[Any], namespace: Namespace, places: Sequence[int]) -> list[bytes | None]:
    """Return the keys of the chunks at `places`: see `Derive`. `keys` is an array of keys, or a list of names."""
    if isinstance(keys, np.ndarray):
        return [*split(keys[places])]
    return [*split(named_keys(namespace.digest, [keys[place] for place in places]))]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is not a value of a config")


def report(router: Router, namespace: Namespace, deadline_s: float) -> None:
    """Send this client's new counts to one node. Before that, ask all members why chunks were missed."""
    group = namespace.group.digest
    misses, absent, gets, puts = router.metrics(group).reset()
    if not (misses or absent or any(gets) or any(puts)):
        return
    if absent:
        misses.update(reasons_of(router, namespace, absent, deadline_s))
    request = messages.Report(dict(misses), tuple(gets), tuple(puts), group=group)
    try:
        router.ask_any(request, deadline_s)
    except RayKVError:
        pass  # these counts are lost


def merge_namespaces(nodes: Mapping[NodeId, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the namespaces in the nodes' statistics: see `Client.namespaces`."""
    silent = {name: stats["error"] for name, stats in nodes.items() if "error" in stats}
    found: dict[str, dict[NodeId, dict[str, Any]]] = {}
    for name, stats in sorted(nodes.items()):
        for text, group in stats.get("namespaces", {}).items():
            found.setdefault(text, {})[name] = dict(group)
    return [{**_merged(text, found[text]), "silent": silent} for text in sorted(found)]


def _merged(text: str, by_node: dict[NodeId, dict[str, Any]]) -> dict[str, Any]:
    """Merge the nodes' statistics of one quota group. `text`: the group's fields as JSON."""
    configs = [group.pop("config") for group in by_node.values()]
    counters = {name: Counter[str]() for name in ("departures", "below_nbytes", "misses")}
    times = {name: Histogram() for name in ("get", "put")}
    for group in by_node.values():
        for name, counter in counters.items():
            counter.update(group.get(name, {}))
        for name, histogram in times.items():
            histogram.add_counts(group[f"{name}_counts"])
    sums = ("chunks", "used_nbytes", "reads", "requests", "served_nbytes")
    return {
        "namespace": Namespace.model_validate_json(text),
        "config": NamespaceConfig.load(next((config for config in reversed(configs) if config), {})),
        **{name: sum(group.get(name, 0) for group in by_node.values()) for name in sums},
        **{name: dict(counter) for name, counter in counters.items()},
        **{f"{name}_times": histogram.summary() for name, histogram in times.items()},
        "nodes": by_node,
    }
