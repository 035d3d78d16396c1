"""Loads of other projects that `benchmarks.connectors` sends: their options, and what is read from their reports."""

import itertools
import json

from benchmarks.outside_loads import TRACE_BLOCK, Brought, figures, timed_trace


def test_a_part_of_the_trace_keeps_its_shared_blocks(tmp_path):
    options = timed_trace(0, block_tokens=32, max_tokens=2000, requests=40, scratch=tmp_path)
    lines = [json.loads(line) for line in options["dataset-path"].read_text().splitlines()]
    assert len(lines) == options["num-prompts"] == 40
    assert all(32 <= line["input_length"] <= 2000 for line in lines)
    assert all(line["input_length"] <= 32 * len(line["hash_ids"]) for line in lines)
    assert all(one["timestamp"] <= other["timestamp"] for one, other in itertools.pairwise(lines))
    blocks = [block for line in lines for block in line["hash_ids"]]
    assert len(set(blocks)) < len(blocks)  # without blocks in common it would measure no reuse
    assert options["timed-trace-chunk-hash-size"] == 32
    again = timed_trace(1, block_tokens=TRACE_BLOCK, max_tokens=20_000, requests=10, scratch=tmp_path)
    assert again["num-prompts"] == 10
    assert again["dataset-path"].read_text() != "".join(json.dumps(line) + "\n" for line in lines)


def test_figures_are_medians_of_the_rounds():
    rounds = [Brought(10, failed, ttft_s, 2 * ttft_s, 30.0, 1.0) for failed, ttft_s in ((0, 1.0), (0, 5.0), (2, 2.0))]
    found = figures(rounds)
    assert (found["ttft_mean_s"], found["ttft_p99_s"], found["failed"], found["requests"]) == (2.0, 4.0, 0, 10)
    assert [each["failed"] for each in found["rounds"]] == [0, 0, 2]
