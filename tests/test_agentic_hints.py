"""On a slice of the trace, a node hits more tokens with the hints of an agent harness than without hints."""

from functools import cache

import pytest

from benchmarks.agentic_hints import MODES, NONE, PARTS, TRACE, calls_of, part_of, replay
from raykv.planner.trace import Request, Trace, read_trace

CALLS = 500


LATE_PIN = pytest.mark.xfail(
    reason="chunks get their pin when their request ends; until then they go before all pinned ones"
)


@cache
def ratio(mode: str, share: float) -> float:
    """Replay the first CALLS calls in the last part of the trace. Returns the hits, as a share of all tokens."""
    calls = list(part_of(calls_of(read_trace(TRACE)), PARTS - 1))[:CALLS]
    return replay(calls, MODES[mode], policy="leaf_lru", share=share, chunk_tokens=512, seed=0)


@pytest.mark.parametrize(
    ("mode", "share"),
    [("ends", 0.05), ("ends", 0.2), pytest.param("ends, pins", 0.05, marks=LATE_PIN), ("ends, pins", 0.2)],
)
def test_hints_raise_the_hit_ratio(mode: str, share: float):
    without, hinted = ratio(NONE, share), ratio(mode, share)
    print(f"{mode}, arena {share:.0%}: {without:.4f} without hints, {hinted:.4f} with them")
    assert hinted > without


def test_a_session_goes_on_where_a_call_extends_another():
    prompts = [[0, 1], [0, 1, 2], [0, 3], [0, 1, 4], [0, 3, 5], [9]]
    requests = [Request(float(at), chunks, 512 * len(chunks), 10) for at, chunks in enumerate(prompts)]
    found = calls_of(Trace("t", requests, 10, 512))
    names = [call.session for call in found]
    assert [names.index(name) for name in names] == [0, 0, 2, 0, 2, 5]
    assert [call.is_last for call in found] == [False, False, False, True, True, True]


def test_a_partial_block_belongs_to_no_session():
    requests = [Request(0.0, [0, 1], 600, 10), Request(1.0, [0, 1], 600, 10), Request(2.0, [7], 100, 10)]
    found = calls_of(Trace("t", requests, 8, 512))
    assert [call.chunks for call in found] == [[0], [0], []]
    assert found[0].session == found[1].session != found[2].session
