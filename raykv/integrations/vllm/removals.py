"""KV events for removed blocks: routers learn which chunks in earlier events of this engine are gone.

Nodes do not report to engines what they evict. So each engine looks up its published chunks again. A thread checks some
of the chunks at a time:

1. The thread asks the owners of a chunk's keys; there is one key for each rank. The chunk is missing if an owner says
   that no node holds it. A chunk that has moved to SSD or to another node is not missing. An owner that does not answer
   is ignored.
2. A chunk that is missing in two checks in a row is gone. One check is not enough, because an owner may learn late of a
   move.
3. The next step of the engine publishes the removal, unless the chunk was published again in the meantime.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.logger import init_logger

from raykv.errors import RayKVError
from raykv.integrations.vllm.metadata import Rank, Scope

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash

    from raykv import Client

logger = init_logger("vllm.raykv.removals")

MAX_PUBLISHED_CHUNKS: Final = 100_000
"""At most this many published chunks are remembered, in about 25 MB. Beyond that, the oldest ones are forgotten."""
FORGET_CHUNKS: Final = 1000
"""If too many chunks are remembered, this many are forgotten at once."""
CHECK_CHUNKS: Final = 512
CHECK_INTERVAL_S: Final = 1.0
CHECK_TIMEOUT_S: Final = 1.0
MAX_CPU_SHARE: Final = 0.001
"""The checks take at most this share of a core. After a long check, the next check starts later."""


class _Published(NamedTuple):
    """A chunk that was named in an event, with the hashes of all its blocks."""

    scope: Scope
    group: int | None
    locality: str | None
    hashes: "tuple[ExternalBlockHash, ...]"


class Removals:
    """Remembers the published chunks, and makes events for those that are gone.

    `check` is called by the thread. The other methods are called by the engine's thread.
    """

    def __init__(self, clients: "Callable[[Scope], Mapping[Rank, Client]]") -> None:
        """Start without chunks. `clients` returns one client for each set of ranks that store the same bytes."""
        self._clients = clients
        self._lock = threading.Lock()  # guards _published, _gone and _named
        self._published: dict[bytes, _Published] = {}
        self._gone: dict[bytes, _Published] = {}
        self._named: Counter[ExternalBlockHash] = Counter()
        """Maps a block hash to the number of chunks with this block. Only chunks of several blocks are counted, because
        two such chunks may begin with the same blocks."""
        self._unchecked: deque[bytes] = deque()
        self._missing: dict[bytes, _Published] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Return the number of chunks that are remembered."""
        return len(self._published)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="raykv-removals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def add(self, scope: Scope, names: Sequence[bytes], event: BlockStored) -> None:
        """Remember the chunks of an event. `names`: the names of these chunks, in order."""
        size = len(event.block_hashes) // len(names)
        with self._lock:
            for place, name in enumerate(names):
                hashes = tuple(event.block_hashes[place * size : (place + 1) * size])
                if self._published.pop(name, None) is None and size > 1:
                    self._named.update(hashes)
                self._published[name] = _Published(scope, event.group_idx, event.locality, hashes)
            if len(self._published) > MAX_PUBLISHED_CHUNKS:
                for name in list(islice(self._published, FORGET_CHUNKS)):
                    self._forget(self._published.pop(name))

    def clear(self) -> None:
        """Count all published chunks as gone, because this engine does not reuse them any more."""
        with self._lock:
            self._gone |= self._published

    def take(self) -> Iterator[BlockRemoved]:
        """Yield the events of the chunks that are gone and were not published again."""
        hashes: dict[tuple[int | None, str | None], list[ExternalBlockHash]] = defaultdict(list)
        with self._lock:
            gone, self._gone = self._gone, {}
            for name, chunk in gone.items():
                if self._published.get(name) is chunk:
                    del self._published[name]
                    hashes[chunk.group, chunk.locality] += self._forget(chunk)
        for (group, locality), removed in hashes.items():
            if removed:
                yield BlockRemoved(removed, MEDIUM_CPU, group_idx=group, locality=locality)

    def check(self) -> None:
        """Look up the next CHECK_CHUNKS published chunks, and again those that were missing in the last check."""
        with self._lock:
            if not self._unchecked:
                self._unchecked.extend(self._published)
            count = min(CHECK_CHUNKS, len(self._unchecked))
            names = dict.fromkeys([*self._missing, *(self._unchecked.popleft() for _ in range(count))])
            chunks = {name: self._published[name] for name in names if name in self._published}
        missing = {name: chunks[name] for name in self._find_missing(chunks)}
        gone = {name: chunk for name, chunk in missing.items() if self._missing.get(name) is chunk}
        self._missing = {name: chunk for name, chunk in missing.items() if name not in gone}
        with self._lock:
            self._gone |= gone

    def _find_missing(self, chunks: Mapping[bytes, _Published]) -> Iterable[bytes]:
        """Yield the names of the chunks that are missing for at least one rank."""
        scopes: dict[Scope, list[bytes]] = defaultdict(list)
        for name, chunk in chunks.items():
            scopes[chunk.scope].append(name)
        for scope, names in scopes.items():
            missing: set[bytes] = set()
            for client in self._clients(scope).values():
                try:
                    absent = client.absent(names, timeout_s=CHECK_TIMEOUT_S)
                except RayKVError as error:
                    logger.debug("raykv, removals: %s", error)
                    continue
                missing.update(name for name, is_absent in zip(names, absent.tolist(), strict=True) if is_absent)
            yield from missing

    def _forget(self, chunk: _Published) -> "list[ExternalBlockHash]":
        """Stop counting the hashes of a chunk. Return the hashes that no other chunk has."""
        if len(chunk.hashes) == 1:
            return list(chunk.hashes)
        self._named.subtract(chunk.hashes)
        ended = [each for each in chunk.hashes if not self._named[each]]
        for each in ended:
            del self._named[each]
        return ended

    def _run(self) -> None:
        delay_s = CHECK_INTERVAL_S
        while not self._closed.wait(delay_s):
            began_s = time.thread_time()
            self.check()
            delay_s = max(CHECK_INTERVAL_S, (time.thread_time() - began_s) / MAX_CPU_SHARE)
