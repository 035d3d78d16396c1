"""A trace of a live cluster, and the planner that reads it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.client.trace_recorder import SEND_KEYS, SEND_S, TraceRecorder
from raykv.errors import UsageError
from raykv.planner.trace import read_trace
from raykv.protocol import chunk_keys, messages
from raykv.protocol.trace_requests import TracedRequest, pack, unpack
from tests.support.nodes import Peer

SPACE = raykv.Namespace(model="m", chunk_tokens=16)


def fetched(node, on: bool) -> list[TracedRequest]:
    """Requests that a node recorded since the last call."""
    return list(unpack(Peer(node).ask(messages.FetchTrace(on)).requests))


def some_keys(count: int, start: int = 0) -> np.ndarray:
    return chunk_keys.named(SPACE.digest, [f"{number}" for number in range(start, start + count)])


def test_requests_come_through_as_they_were():
    requests = [
        TracedRequest(12.5, 16, some_keys(3)),
        TracedRequest(13.0, 16, some_keys(0)),
        TracedRequest(14.0, 512, some_keys(2, 7)),
    ]
    back = list(unpack(pack(requests)))
    assert [(each.at_s, each.chunk_tokens, each.keys.tolist()) for each in back] == [
        (each.at_s, each.chunk_tokens, each.keys.tolist()) for each in requests
    ]


def test_every_cut_and_damage_is_refused():
    raw = pack([TracedRequest(12.5, 16, some_keys(3)), TracedRequest(13.0, 16, some_keys(2))])
    whole = {0, 16 + 48}
    for cut in set(range(len(raw))) - whole:
        with pytest.raises(UsageError, match="end in the middle"):
            list(unpack(raw[:cut]))
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        try:
            list(unpack(rng.randbytes(rng.randrange(64))))
        except UsageError:
            pass


def test_a_client_gathers_for_a_moment_and_sends_much_at_once():
    sent: list[list[TracedRequest]] = []
    recorder = TraceRecorder(lambda raw: sent.append(list(unpack(raw))), 16)
    recorder.record(some_keys(2), today_s=100.0, now_s=1.0)
    assert len(sent) == 1
    recorder.record(some_keys(2), today_s=100.0, now_s=1.0 + SEND_S / 2)
    assert len(sent) == 1
    recorder.record(some_keys(2), today_s=100.1, now_s=1.0 + SEND_S)
    assert [len(each) for each in sent] == [1, 2]
    recorder.record(some_keys(SEND_KEYS), today_s=100.1, now_s=1.0 + SEND_S)
    assert [len(each) for each in sent] == [1, 2, 1]


def test_a_cluster_reports_its_requests_and_the_planner_reads_them(tmp_path: Path):
    with raykv.embedded(2) as cluster:
        here, there = (cluster.client(SPACE, node=number) for number in range(2))
        here.match(["before"])
        for node in cluster.nodes:
            assert fetched(node, True) == []
        prompts = [[f"a{number}" for number in range(4)], [f"a{number}" for number in range(2)] + ["b", "c"]]
        here.match(prompts[0])
        here.match(prompts[0], record=False)
        there.match(prompts[1])
        here.using(SPACE).match(prompts[0][:1])
        reported = [fetched(node, False) for node in cluster.nodes]
        here.match(["after"])
        assert [fetched(node, False) for node in cluster.nodes] == [[], []]
    assert [len(each) for each in reported] == [2, 1]
    requests = sorted([each for some in reported for each in some], key=lambda each: each.at_s)
    assert [len(each.keys) for each in requests] == [4, 4, 1]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(each.line(requests[0].at_s) + "\n" for each in requests))
    assert json.loads(path.read_text().splitlines()[0])["at_s"] == 0.0
    trace = read_trace(path)
    assert [request.chunks for request in trace.requests] == [[0, 1, 2, 3], [0, 1, 4, 5], [0]]
    assert (trace.chunk_tokens, trace.requests[0].tokens) == (16, 64)
