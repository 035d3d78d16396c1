"""Asks raykv which chunks of a prompt are stored, and where. Bounded in time, in keys and in calls."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raykv.errors import RayKVError
from raykv.types import NodeId

if TYPE_CHECKING:
    from raykv import Client
    from raykv.types import KeyArray

MAX_PROBES: Final = 64
"""A lookup asks for at most this many chunks of a prompt, at equal distances. Stored chunks form a prefix, so each
answer holds for the chunks since the one before."""
HERE_PROBES: Final = 8
"""This host's memory is asked for this many chunks at equal distances, and by bisection between the last that is there
and the first that is not."""
HERE_SHARE: Final = 0.75
"""Engines that are all on this host load the rest of a prompt at equal cost. If this host's memory has the leading
HERE_SHARE of its chunks, the rest hardly changes the choice, so nobody is asked about it."""
THREADS: Final = 4
MAX_CALLS: Final = 16
"""At most this many lookups run at once. Further prompts are routed without one."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks with the same holders.

    Attributes:
        stop: Number of leading chunks of the prompt up to the end of this run.
        holders: The nodes that hold them. Empty: whichever would be the fastest for each engine.
        below: Whether all holders have the chunks only on SSD or in a file.
    """

    stop: int
    holders: tuple[NodeId, ...]
    below: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """The leading chunks of a prompt that are stored, as runs. `digest`: of the namespace under which they are."""

    runs: tuple[Run, ...] = ()
    digest: bytes = b""

    @property
    def chunks(self) -> int:
        return self.runs[-1].stop if self.runs else 0


def probes(count: int, most: int = MAX_PROBES) -> list[int]:
    """Return the positions of the chunks to ask for, at most `most`. The last chunk is among them."""
    asked = min(count, most)
    return [-(-(number + 1) * count // asked) - 1 for number in range(asked)]


def runs_of(places: Sequence[int], holders: Sequence[tuple[NodeId, ...]], below: Sequence[bool]) -> tuple[Run, ...]:
    """Join the answers up to the first chunk that nobody holds."""
    runs: list[Run] = []
    for place, named, is_below in zip(places, holders, below, strict=True):
        if not named:
            break
        if runs and set(runs[-1].holders) == set(named) and runs[-1].below == is_below:
            runs.pop()
        runs.append(Run(place + 1, named, is_below))
    return tuple(runs)


def leading(count: int, has: Callable[[int], bool]) -> int:
    """Return how many leading chunks of `count` are there, by few questions: stored chunks form a prefix."""
    known = 0
    for place in probes(count, HERE_PROBES):
        if not has(place):
            return bisect_left(range(known, place), True, key=lambda each: not has(each)) + known
        known = place + 1
    return known


class ChunkFinder:
    """Looks chunks up without blocking the event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="raykv-route")
        self._calls = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def here(self, client: "Client", names: Sequence[bytes], *, all_near: bool) -> tuple[Run, ...] | None:
        """Return the stored prefix of these chunks, without a call. None: this host's memory does not tell.

        It does if the pool is this memory alone.

        Args:
            all_near: Whether all engines are on this host. Then it also does if most chunks are in its memory.
        """
        stop = self._leading(client, names)
        if names and not client.router.is_alone and not (all_near and stop >= HERE_SHARE * len(names)):
            return None
        return (Run(stop, self._mine(client)),) if stop else ()

    async def ask(self, client: "Client", names: Sequence[bytes]) -> tuple[Run, ...] | None:
        """Ask the owners for the stored prefix. None: raykv has not answered in time, or is busy."""
        if self._calls >= MAX_CALLS:
            return None
        places, stop, mine = probes(len(names)), self._leading(client, names), self._mine(client)
        keys = client.keys([names[place] for place in places])
        self._calls += 1
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, client, keys)
        call.add_done_callback(self._end)
        done, _ = await asyncio.wait([call], timeout=self._timeout_s)
        answer = call.result() if done else None
        if answer is None:
            return None
        holders, below = answer
        named = [theirs or (mine if place < stop else ()) for theirs, place in zip(holders, places, strict=True)]
        return runs_of(places, named, below)

    def _mine(self, client: "Client") -> tuple[NodeId, ...]:
        return () if client.router.local_id is None else (client.router.local_id,)

    def _leading(self, client: "Client", names: Sequence[bytes]) -> int:
        """Return the number of leading chunks in this host's memory."""
        local = client.router.local
        if local is None:
            return 0
        ready = local.reader.ready_one
        return leading(len(names), lambda place: ready(client.key(names[place])))

    def _ask(self, client: "Client", keys: "KeyArray") -> tuple[list[tuple[NodeId, ...]], list[bool]] | None:
        try:
            deadline_s = time.monotonic() + self._timeout_s
            found = client.router.locate(keys, deadline_s, group=client.namespace.group.digest)
        except RayKVError:
            return None
        if not np.all(found.answered):
            return None
        return found.holders, found.below_memory.tolist()

    def _end(self, call: "asyncio.Future[Any]") -> None:
        self._calls -= 1
        if not call.cancelled():
            call.exception()  # read it; otherwise asyncio logs the exception of a call that nobody waits for
