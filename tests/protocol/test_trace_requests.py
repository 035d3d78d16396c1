"""A trace recorded on a live cluster, and the planner that reads it."""

import json
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.client.trace_recorder import SEND_KEYS, SEND_S, TraceRecorder
from raykv.errors import ProtocolError
from raykv.planner.trace import read_trace
from raykv.protocol import chunk_keys, codec, messages
from raykv.protocol.trace_requests import TracedRequest
from tests.support.nodes import Peer

SPACE = raykv.Namespace(model="m", chunk_tokens=16)


def fetched(node, on: bool) -> list[TracedRequest]:
    """Return the requests that a node recorded since the last call. From now on, the node records requests if `on`."""
    found: list[TracedRequest] = Peer(node).ask(messages.FetchTrace(on)).requests
    return found


def some_keys(count: int, start: int = 0) -> np.ndarray:
    return chunk_keys.named(SPACE.digest, [f"{number}" for number in range(start, start + count)])


@pytest.mark.parametrize("at_s", [-1.0, 1e12, float("nan"), float("inf")])
def test_impossible_times_are_refused(at_s):
    message = messages.RecordTrace([TracedRequest(at_s, 16, bytes(32))])
    with pytest.raises(ProtocolError, match="float"):
        codec.decode(codec.encode(message, 0, 0)[codec.HEADER.size :])


def test_a_client_gathers_for_a_moment_and_sends_much_at_once():
    sent: list[list[TracedRequest]] = []
    recorder = TraceRecorder(sent.append, 16)
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
    assert [len(each.keys) for each in requests] == [64, 64, 16]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(each.line() + "\n" for each in requests))
    assert json.loads(path.read_text().splitlines()[0])["at_s"] == round(requests[0].at_s, 6)
    trace = read_trace(path)
    assert [request.chunks for request in trace.requests] == [[0, 1, 2, 3], [0, 1, 4, 5], [0]]
    assert (trace.chunk_tokens, trace.requests[0].tokens) == (16, 64)
