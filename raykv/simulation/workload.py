"""What simulated engines request: chains of chunks, from a trace or synthetic."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.planner.trace import Trace
from raykv.protocol import chunk_keys
from raykv.types import KeyArray

DOCUMENT_CHUNKS: Final = 4
TURN_CHUNKS: Final = 2
TURNS: Final = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes:
        at_s: When it begins.
        chunks: Numbers of its chunks, first to last.
        session: Number of the conversation.
    """

    at_s: float
    chunks: tuple[int, ...]
    session: int


class Chunks:
    """All chunks of a workload. A chunk is a number from 0, which is also the low half of its key.

    Attributes:
        keys: Shape [chunks, 2].
        raw: The keys, as 16 bytes each.
        parent: For each chunk the chunk before it; -1 if it is the first one of a prompt.
        depth: For each chunk the number of chunks before it.
        nbytes: Length of each chunk in bytes.
    """

    def __init__(self, parent: npt.NDArray[np.int64], depth: npt.NDArray[np.int64], *, nbytes: int, seed: int) -> None:
        high = np.random.default_rng(seed).integers(0, 1 << 64, len(parent), np.uint64)
        self.keys: KeyArray = np.stack([high, np.arange(len(parent), dtype=np.uint64)], axis=1)
        whole = chunk_keys.to_bytes(self.keys)
        self.raw = [whole[start : start + 16] for start in range(0, len(whole), 16)]
        self.parent, self.depth, self.nbytes = parent.tolist(), depth.tolist(), nbytes

    def __len__(self) -> int:
        return len(self.raw)


@dataclass(frozen=True)
class Workload:
    """Requests, and what is stored before the first one.

    Attributes:
        chunks: All chunks.
        requests: In order of time.
        stored: Runs of chunks that are stored before the first request: each run on a node chosen at random.
    """

    chunks: Chunks
    requests: list[Request]
    stored: list[tuple[int, ...]]

    def between(self, start_s: float, stop_s: float) -> "Workload":
        """Return the workload with only the requests of a part of the time."""
        return replace(self, requests=[each for each in self.requests if start_s <= each.at_s < stop_s])


def chains(prompts: list[tuple[int, ...]], count: int, *, nbytes: int, seed: int) -> Chunks:
    """Return the chunks of prompts. A chunk that follows different chunks in several prompts gets the first parent."""
    parent, depth = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    for prompt in prompts:
        for place, chunk in enumerate(prompt):
            if depth[chunk] < 0:
                depth[chunk], parent[chunk] = place, prompt[place - 1] if place else -1
    return Chunks(parent, depth, nbytes=nbytes, seed=seed)


def of_trace(trace: Trace, *, nbytes: int, speed: float = 1.0, seed: int = 0) -> Workload:
    """Return a trace's requests, `speed` times as fast. Requests that begin with the same two chunks are a session."""
    began_s = trace.requests[0].at_s
    requests = [
        Request((each.at_s - began_s) / speed, tuple(each.chunks), hash(tuple(each.chunks[:2])))
        for each in trace.requests
    ]
    return Workload(chains([each.chunks for each in requests], trace.chunks, nbytes=nbytes, seed=seed), requests, [])


def replay(trace: Trace, *, requests_per_s: float, seconds: float, nbytes: int, seed: int) -> Workload:
    """Return prompts that are drawn at random from a trace, so with the trace's popularity of chunks at any rate.

    All chunks are stored before. What one request of the trace added to those before it is one run.
    """
    rng = np.random.default_rng(seed)
    prompts = [tuple(each.chunks) for each in trace.requests]
    count = rng.poisson(requests_per_s * seconds)
    chosen = zip(
        np.sort(rng.random(count) * seconds).tolist(), rng.integers(0, len(prompts), count).tolist(), strict=True
    )
    known, stored = set[int](), list[tuple[int, ...]]()
    for prompt in prompts:
        stored.append(tuple(chunk for chunk in prompt if chunk not in known))
        known.update(prompt)
    requests = [Request(at_s, prompts[place], place) for at_s, place in chosen]
    return Workload(chains(prompts, trace.chunks, nbytes=nbytes, seed=seed), requests, [run for run in stored if run])


def hot_root(
    *, requests_per_s: float, seconds: float, sessions: int, documents: int, zipf: float = 1.0, nbytes: int, seed: int
) -> Workload:
    """Return conversations over documents. Every prompt begins with the same chunk, the root.

    A prompt is the root, the DOCUMENT_CHUNKS chunks of a document, and the turns of a conversation so far. The engine
    computes the TURN_CHUNKS chunks of the next turn. After TURNS requests, a conversation over another document takes
    the place of this one. So of all chunks that are stored already when a prompt needs them, the root is one of
    1 + DOCUMENT_CHUNKS + TURN_CHUNKS * (TURNS - 1) / 2 = 9.

    Args:
        requests_per_s: Mean rate; requests arrive by a Poisson process.
        sessions: Number of conversations at a time. Each request belongs to one of them, chosen at random.
        documents: Number of documents. Their popularity has a Zipf distribution.
        zipf: Its exponent.
    """
    rng = np.random.default_rng(seed)
    count = rng.poisson(requests_per_s * seconds)
    weights = np.arange(1, documents + 1) ** -zipf
    of_document = [
        (0, *range(at, at + DOCUMENT_CHUNKS)) for at in range(1, 1 + documents * DOCUMENT_CHUNKS, DOCUMENT_CHUNKS)
    ]
    chosen = iter(rng.choice(documents, size=sessions + count, p=weights / weights.sum()).tolist())
    turns = rng.integers(0, TURNS, sessions).tolist()
    chunks, session_count = 1 + documents * DOCUMENT_CHUNKS, sessions
    live = []
    for session, turn in enumerate(turns):
        new = turn * TURN_CHUNKS
        live.append((session, (*of_document[next(chosen)], *range(chunks, chunks + new))))
        chunks += new
    prompts = [prompt for _, prompt in live]
    stored = [(0,), *(prompt[1:] for prompt in of_document), *(prompt[1 + DOCUMENT_CHUNKS :] for prompt in prompts)]
    requests = []
    for at_s, slot in zip(
        np.sort(rng.random(count) * seconds).tolist(), rng.integers(0, sessions, count).tolist(), strict=True
    ):
        session, before = live[slot]
        prompt = (*before, *range(chunks, chunks + TURN_CHUNKS))
        chunks += TURN_CHUNKS
        requests.append(Request(at_s, prompt, session))
        live[slot] = session, prompt
        if len(prompt) == 1 + DOCUMENT_CHUNKS + TURN_CHUNKS * TURNS:
            live[slot] = session_count, of_document[next(chosen)]
            session_count += 1
    prompts += [request.chunks for request in requests] + of_document
    return Workload(chains(prompts, chunks, nbytes=nbytes, seed=seed), requests, [run for run in stored if run])
