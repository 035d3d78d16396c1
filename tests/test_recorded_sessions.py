"""Recorded sessions of agents, which `benchmarks.connectors --load agentic` replays."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recorded_sessions import read
from raykv.errors import ConfigError

VOCABULARY = range(1000, 2000)


def request(t: float, hash_ids: list[int]) -> dict[str, Any]:
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": 64 * len(hash_ids),
        "out": 5,
        "hash_ids": hash_ids,
        "api_time": 1.0,
    }


def record(path: Path, requests: list[dict[str, Any]]) -> None:
    fields = {"id": path.stem, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests}
    path.write_text(json.dumps(fields))


def load(folder: Path, **options: Any) -> Any:
    return read(folder, **{"seed": 1, "block_tokens": 4, "max_tokens": 100, "vocabulary": VOCABULARY, **options})


def test_prompts_share_what_the_recording_shares(tmp_path):
    nested = {"t": 1.0, "type": "subagent", "agent_id": "a", "requests": [request(1.5, [1, 2, 9])]}
    record(tmp_path / "a.json", [request(0.0, [1, 2, 3]), nested, request(3.0, [1, 2, 3, 4])])
    record(tmp_path / "b.json", [request(100.0, [1, 2]), request(101.0, [1, 2, 5])])
    found = load(tmp_path)
    assert [(each.session, each.turn, each.at_s, len(each.prompt)) for each in found] == [
        (0, 0, 0.0, 12),
        (1, 0, 0.0, 8),
        (1, 1, 1.0, 12),
        (0, 1, 1.5, 12),
        (0, 2, 3.0, 16),
    ]
    first, other, later, nested_one, last = (each.prompt for each in found)
    assert last[:12] == first
    assert nested_one[:8] == first[:8]
    assert nested_one[8:] != first[8:]
    assert later[:8] == other
    assert other != first[:8]  # equal numbers in other files are other blocks
    assert all(token in VOCABULARY for each in found for token in each.prompt)
    assert [each.prompt for each in load(tmp_path)] == [each.prompt for each in found]
    assert load(tmp_path, seed=2)[0].prompt != first


def test_longer_prompts_are_left_out(tmp_path):
    record(tmp_path / "a.json", [request(5.0, list(range(50))), request(9.0, [1, 2]), request(10.0, [])])
    assert [(each.turn, each.at_s, len(each.prompt)) for each in load(tmp_path)] == [(0, 0.0, 8)]
    with pytest.raises(ConfigError, match=r"at most 4 tokens"):
        load(tmp_path, max_tokens=4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"requests": 5}', '{"requests": [{"t": 1}]}', '{"requests": [3]}'])
def test_other_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.json.*kv-cache-tester"):
        load(tmp_path)
