"""The engine's sentence about each request that has ended, for `raykv why --request` and the log."""

import time
from collections import Counter
from typing import Any

from vllm.logger import init_logger

from raykv.client.request_trail import TrailSender
from raykv.errors import PeerUnavailable
from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.lookups import Lookups
from raykv.integrations.vllm.metadata import Scope
from raykv.integrations.vllm.tracked import Tracked, hands_over
from raykv.protocol.request_trail import TrailEntry

logger = init_logger("vllm.raykv.trail")


class EngineTrail:
    """Makes the sentences, and sends them to the node on a thread."""

    def __init__(self, lookups: Lookups, groups: Groups, *, is_on: bool) -> None:
        self._lookups, self._groups, self._is_on = lookups, groups, is_on
        self._sender = TrailSender(self._send)

    def add(self, tracked: Tracked) -> None:
        """Make the sentence about a request that has ended. This asks nobody."""
        if not self._is_on:
            return
        text = sentence(tracked)
        logger.debug("%s: %s", tracked.request.request_id, text)
        self._sender.add(tracked.request.request_id, text, absent=self._absent(tracked))

    def close(self) -> None:
        self._sender.close()

    def _send(self, entries: list[TrailEntry]) -> None:
        client = next(iter(self._lookups.clients(Scope()).values()), None)
        if client is None:
            raise PeerUnavailable("no node is connected yet")
        client.add_to_trail(entries)

    def _absent(self, tracked: Tracked) -> bytes:
        """Return the key of the first chunk that was looked up and not found; empty if there is none."""
        lookup, hashes = tracked.lookup, tracked.request.block_hashes
        client: Any = next(iter(self._lookups.clients(tracked.scope).values()), None)
        if lookup is None or client is None:
            return b""
        stop = min(tracked.request.num_prompt_tokens, len(hashes) * self._groups.hash_tokens)
        for group in self._groups.each:
            end = (max(lookup.found.hit.tokens, lookup.computed) // group.chunk_tokens + 1) * group.chunk_tokens
            if group.whole and end <= stop:
                return bytes(client.key(self._groups.name(group, hashes, end)))
        return b""


def sentence(tracked: Tracked) -> str:
    """Say what an engine found, loaded and computed for a request."""
    request, lookup, times = tracked.request, tracked.lookup, tracked.load_times
    prompt = request.num_prompt_tokens
    role = "prefill" if hands_over(request) else "engine"
    found = max(lookup.found.hit.tokens - lookup.computed, 0) if lookup is not None else 0
    loaded = max(tracked.loaded - tracked.cached, 0)
    parts = [f"{role}: {prompt} prompt tokens"]
    if tracked.started:
        parts.append(f"{tracked.cached} in the engine's own cache")
    if found:
        assert lookup is not None
        held = next(iter(lookup.found.held.values()), {})
        holders = Counter(
            f"{held[index, end].node_id}{' below memory' if held[index, end].below_memory else ''}"
            for index, ends in lookup.found.hit.ends.items()
            for end in ends
            if (index, end) in held
        )
        known = "expected from a prefill engine" if lookup.found.is_expected else "found in raykv"
        parts.append(f"{found} {known} ({_counts(holders, 'chunks on')})")
        if not loaded and tracked.started:
            parts.append("not loaded, because computing them was expected to be sooner or the load failed")
    else:
        parts.append("no more found in raykv" if lookup is not None else "nothing looked up")
    if loaded:
        parts.append(f"{loaded} loaded" if tracked.started else f"a load of {loaded} was ordered")
        if times is not None:
            paths = _counts(
                Counter({f"{node} by {path}": chunks for node, path, chunks in times.sources}), "chunks from"
            )
            parts[-1] += f" in {1e3 * (times.ended_s - times.began_s):.0f} ms ({times.nbytes / 1e6:.1f} MB; {paths})"
            if lookup is not None and lookup.found.is_expected:
                parts[-1] += f" from {_clock(times.began_s)} to {_clock(times.ended_s)}, while they were computed"
    if tracked.started:
        computed = prompt - max(tracked.cached, tracked.loaded)
        parts.append(f"{max(computed, 0)} computed, {request.num_output_tokens} generated")
    else:
        parts.append("it ended before the engine began with it")
    if tracked.admission:
        parts.append(f"preempted {tracked.admission} times; the rest is since the last time")
    return "; ".join(parts)


def _clock(at_s: float) -> str:
    """Return the time of day of a time on the monotonic clock."""
    since_s = time.time() - time.monotonic() + at_s
    return time.strftime("%H:%M:%S", time.gmtime(since_s)) + f"{since_s % 1:.3f}"[1:]


def _counts(counts: Counter[str], what: str) -> str:
    return ", ".join(f"{count} {what} {name}" for name, count in counts.most_common())
