"""The planner's records, and the command `raykv plan`."""

import csv
import io
import json
import subprocess
import sys

import pytest

from raykv.config import GIB
from raykv.errors import ConfigError, UsageError
from raykv.eviction import POLICIES
from raykv.planner import ModelShape, as_csv, as_json, as_table, parse_trace, plan
from raykv.tools.cli import main

LINES = [
    json.dumps({"timestamp": at, "input_length": 1536, "output_length": 1, "hash_ids": [0, at % 3 + 1, at % 3 + 4]})
    for at in range(9)
]
SMALL = ModelShape(layers=2, kv_heads=1, head_size=8, dtype="float16", hidden=16, parameters=1000)


def newest(columns, rows, now):
    return -columns.inserted[rows].astype(int)


def test_records_say_what_is_saved():
    trace = parse_trace(LINES, "t")
    record = plan(trace, [7], model=SMALL)[0]
    assert SMALL.token_nbytes == 2 * 2 * 1 * 8 * 2
    assert (record.trace, record.policy) == ("t", "leaf_lru")
    assert (record.requests, record.chunks, record.tokens) == (9, 27, 9 * 1536)
    assert (record.size_chunks, record.size_nbytes, record.size_share) == (7, 7 * 512 * 64, 1.0)
    assert record.prefix_hits == 20
    assert record.prefix_hit_ratio == 20 / 27
    assert record.tokens_hit == 20 * 512
    assert record.saved_gib == 20 * 512 * 64 / GIB
    each = [512, 512, *[1536] * 6]  # hit tokens of each request with hits
    attention = sum(4 * 2 * 16 * tokens * (tokens + 1) / 2 for tokens in each)
    assert record.saved_flops == 2 * 1000 * 20 * 512 + attention


def test_sizes_are_shares_bytes_or_chunks():
    trace = parse_trace(LINES)
    sizes = [record.size_chunks for record in plan(trace, ["50%", " 29 %", "64 KiB", "70000", 3], model=SMALL)]
    assert sizes == [4, 2, 2, 2, 3]


@pytest.mark.parametrize("size", ["", "-5%", "5%%", "much", "1 GB", "0%", "100 B", 0, "nan%"])
def test_a_wrong_size_is_named(size):
    with pytest.raises(UsageError, match="size"):
        plan(parse_trace(LINES), [size], model=SMALL)


def test_a_second_tier_is_tried_with_each_size_of_memory():
    trace = parse_trace(LINES)
    records = plan(trace, [3, 5], ["leaf_lru", "belady"], model=SMALL, ssd_sizes=["0", " 0%", "100%"])
    sizes = [(3, 0), (3, 0), (3, 7), (5, 0), (5, 0), (5, 7)] * 2
    assert [(record.size_chunks, record.ssd_chunks) for record in records] == sizes
    without, below = records[1:3]
    assert (without.ssd_nbytes, without.ssd_hits, without.ssd_written_nbytes) == (0, 0, 0)
    assert below.ssd_nbytes == 7 * 512 * 64
    assert below.prefix_hits == without.prefix_hits + below.ssd_hits
    assert below.ssd_written_nbytes == 6 * 512 * 64, "each once, except the first, which never leaves memory"
    assert below.ssd_written_nbytes_per_day == below.ssd_written_nbytes * 86_400, "the trace is shorter than a second"
    assert below.ssd_write_amplification == 1.0
    assert records[8].prefix_hits == 20, "the bound is that of both together"
    poor = plan(trace, [3], model=SMALL, ssd_sizes=["100%"], ssd_nbytes_per_day=24 * 512 * 64)
    assert poor[0].ssd_written_nbytes == 512 * 64, "one chunk an hour"


def test_policies_are_names_functions_or_all():
    trace = parse_trace(LINES)
    own = "raykv.eviction.by_columns:LRU"
    names = [record.policy for record in plan(trace, [3], ["lru", "all", newest, own])]
    assert names == [
        "lru",
        *[name for name in POLICIES if name != "lru"],
        "belady",
        "newest",
        "raykv.eviction.by_columns:LRU",
    ]
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        plan(trace, [3], ["best"])


def test_records_as_text():
    records = plan(parse_trace(LINES, "t"), ["50%", "100%"], ["lru", "belady"])
    rows = list(csv.DictReader(io.StringIO(as_csv(records))))
    assert [row["policy"] for row in rows] == ["lru", "lru", "belady", "belady"]
    assert json.loads(as_json(records))[1]["prefix_hits"] == 20 == int(rows[1]["prefix_hits"])
    table = as_table(records).splitlines()
    assert table[0] == "t: 9 requests, 27 chunks read, 13,824 tokens"
    assert table[-1].split()[:2] == ["belady", "100.0%"]
    assert as_table([]) == ""


def test_the_command(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES))
    assert (
        main(["plan", str(path), "--sizes", "50%,7 MiB", "--policies", "fifo, belady", "--layers", "1", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [(record["policy"], record["size_chunks"]) for record in found] == [
        ("fifo", 4),
        ("fifo", 3),
        ("belady", 4),
        ("belady", 3),
    ]
    assert main(["plan", str(path), "--policies", "all"]) == 0
    assert "belady" in capsys.readouterr().out
    assert main(["plan", str(path), "--ssd-sizes", "0,50%", "--ssd-per-day", "1 TiB"]) == 0
    assert "from SSD %" in capsys.readouterr().out
    assert main(["plan", str(path), "--tokens-per-chunk", "600", "--sizes", "1 GiB", "--json"]) == 0
    assert {record["size_chunks"] for record in json.loads(capsys.readouterr().out)} == {(1 << 30) // (600 << 17)}
    assert main(["plan", str(path), "--csv"]) == 0
    assert capsys.readouterr().out.startswith("trace,policy,size_chunks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "many"], "size 'many'"),
        (["--policies", "best"], "unknown policy 'best'"),
        (["--layers", "0"], "above 0"),
        (["--ssd-sizes", "5%,some"], "size 'some'"),
        (["--ssd-per-day", "1 TB"], "--ssd-per-day: '1 TB' is not a size"),
        (["--tokens-per-chunk", "0"], "--tokens-per-chunk 0 must be from 1"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES))
    assert main(["plan", str(path), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES))
    assert main(["plan", str(path), "--plot", str(tmp_path / "chart.svg")]) == 0
    assert "<svg" in (tmp_path / "chart.svg").read_text()


@pytest.mark.slow
def test_without_matplotlib_it_says_how_to_get_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES))
    program = f"""
import sys
sys.modules["matplotlib"] = None
from raykv.tools.cli import main
sys.exit(main(["plan", {str(path)!r}, "--plot", "chart.svg"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "pip install 'raykv[notebooks]'" in done.stderr
