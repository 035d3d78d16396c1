"""Traces of each format are read, and wrong lines are reported."""

import gzip
import json

import pytest

from raykv.errors import UsageError
from raykv.planner.trace import parse_trace, read_trace

MOONCAKE = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [10, 11, 12]}',
    '{"timestamp": 2500, "input_length": 1024, "output_length": 1, "hash_ids": [10, 14]}',
]
STORED = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [], "block_size": 16}


def test_mooncakes_format():
    trace = parse_trace(MOONCAKE, "m")
    assert (trace.name, trace.chunks, trace.chunk_tokens, trace.accesses, trace.tokens) == ("m", 4, 512, 5, 2124)
    first, second = trace.requests
    assert (first.at_s, first.chunks, first.tokens, first.output_tokens) == (0.0, [0, 1, 2], 1100, 7)
    assert (second.at_s, second.chunks) == (2.5, [0, 3])
    assert trace.tokens_of(first) == [512, 512, 76], "the last block may be partial"
    assert trace.tokens_of(second) == [512, 512]
    assert trace.seconds == 2.5


def test_our_own_format():
    trace = parse_trace(
        [
            '{"at_s": 5, "tokens": 300, "chunk_tokens": 256, "keys": ["aa"]}',
            '{"at_s": 1.5, "tokens": 512, "chunk_tokens": 256, "keys": ["aa", "bb"], "output_tokens": 3, "more": 1}',
        ]
    )
    assert [request.at_s for request in trace.requests] == [1.5, 5], "in order of time"
    assert [request.chunks for request in trace.requests] == [[0, 1], [0]]
    assert trace.chunk_tokens == 256


@pytest.mark.parametrize("array", [False, True])
def test_events_become_requests(array):
    def batch(at_s, *events):
        rows = [list({**event}.values()) if array else event for event in events]
        return json.dumps([at_s, rows, 0] if array else {"ts": at_s, "events": rows})

    def stored(hashes, parent):
        return {**STORED, "block_hashes": hashes, "parent_block_hash": parent}

    cleared = {"type": "AllBlocksCleared"}
    trace = parse_trace(
        [
            batch(1.0, stored(["a", "b"], None), stored([7], None)),
            batch(1.5, stored(["c"], "b")),  # continues the same request
            batch(9.0, stored(["d"], "c"), cleared),  # another request, which read a, b and c
            batch(9.1, stored(["e"], "b"), stored(["y"], "x")),  # b is no longer the end of a request, and x is unknown
            batch(20.0, {"type": "BlockRemoved", "block_hashes": ["a"], "medium": None}),
        ]
    )
    names = ["a", "b", "c", 7, "d", "e", "x", "y"]
    assert [[names[chunk] for chunk in request.chunks] for request in trace.requests] == [
        ["a", "b", "c"],
        [7],
        ["a", "b", "c", "d"],
        ["a", "b", "e"],
        ["x", "y"],
    ]
    assert trace.chunk_tokens == 16
    assert trace.requests[0].tokens == 48


def test_files_plain_and_packed(tmp_path):
    text = "\n".join(["", *MOONCAKE, "  "]).encode()
    (tmp_path / "plain.jsonl").write_bytes(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "plain.jsonl").requests == read_trace(str(tmp_path / "packed")).requests


LINE = '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
HOSTILE = [
    (LINE.replace("[1, 2]", "[1, 2.5]"), r"line 2: field 'hash_ids\[1\]': Expected"),
    (LINE.replace("[1, 2]", "[1, null]"), r"line 2: field 'hash_ids\[1\]'"),
    (LINE.replace("[1, 2]", '[1, ""]'), r"line 2: field 'hash_ids\[1\]'"),
    (LINE.replace("[1, 2]", f'["{"x" * 200}"]'), r"line 2: field 'hash_ids\[0\]'"),
    (LINE.replace("[1, 2]", "[1, 2, 3]"), "line 2: field 'hash_ids': 3 chunks of 512 tokens are more than 600 tokens"),
    (LINE.replace("600", "-600"), "line 2: field 'input_length'"),
    (LINE.replace("600", "1e400"), "line 2: field 'input_length'"),
    (LINE.replace("600", '"600"'), "line 2: field 'input_length': Expected `int`, got `str`"),
    (LINE.replace('"timestamp": 1', '"timestamp": -1'), "line 2: field 'timestamp'"),
    (LINE.replace('"timestamp": 1', '"timestamp": NaN'), "line 2: JSON is malformed"),
    (LINE.replace('"timestamp": 1,', ""), "line 2: field 'timestamp': Object missing required field"),
    (LINE[:30], "line 2: Input data was truncated"),
    ("[" * 100_000, "line 2: "),
    ("null", "line 2: Expected `object`, got `null`"),
    (b"\xff\xfe{}", "line 2: "),
    (LINE.replace("input", "in\\ud800put"), "line 2: "),
]


@pytest.mark.parametrize(("line", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_wrong_line_is_named_with_its_field(line, message):
    with pytest.raises(UsageError, match=message):
        parse_trace([LINE, line, LINE])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no request with a chunk"),
        (["", "  "], "no request with a chunk"),
        ([LINE.replace("[1, 2]", "[]")], "no request with a chunk"),
        (['{"a": 1}'], "line 1: unknown format"),
        (["[" * 100_000], "line 1: "),
        (["7"], "line 1: unknown format"),
        (
            ['{"at_s": 0, "tokens": 9, "keys": [1], "chunk_tokens": 16}', '{"at_s": 0, "tokens": 9, "keys": [1]}'],
            "request 2: field 'chunk_tokens': 512, where it was 16 before",
        ),
        (['{"ts": -1, "events": []}'], "line 1: field 'ts'"),
        (["[1]"], "line 1: field 'events': Object missing"),
        (['[1, [["BlockStored", [1]]]]'], r"line 1: field 'events\[0\].parent_block_hash': Object missing"),
        (['[1, [["BlockStored", [1], null, [], 0]]]'], r"line 1: field 'events\[0\].block_size'"),
        (["[1, [[]]]"], r"line 1: field 'events\[0\]': not an event of vLLM"),
        (['[1, [{"type": "Other"}]]'], r"line 1: field 'events\[0\]': not an event of vLLM: 'Other'"),
    ],
)
def test_a_wrong_trace_says_what_is_wrong(lines, message):
    with pytest.raises(UsageError, match=message):
        parse_trace(lines)


def test_a_chain_of_events_in_a_circle_ends():
    lines = [json.dumps([1, [["BlockStored", [1], 2, [], 16]]]), json.dumps([9, [["BlockStored", [2], 1, [], 16]]])]
    assert len(parse_trace(lines).requests) == 2


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "cut.gz").write_bytes(gzip.compress("\n".join(MOONCAKE).encode())[:-9])
    with pytest.raises(UsageError, match=r"cut.gz"):
        read_trace(tmp_path / "cut.gz")
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8bnothing of the kind")
    with pytest.raises(UsageError, match=r"bad.gz"):
        read_trace(tmp_path / "bad.gz")
