"""`raykv why` and `raykv namespace`, on a cluster without Ray."""

import json
import time
from collections.abc import Iterator

import pytest

import raykv
from raykv.config import NamespaceConfig
from raykv.embedded import EmbeddedCluster
from raykv.protocol.request_trail import TrailEntry
from raykv.tools.cli import _table, main, parser
from raykv.tools.commands import status_lines

MINE = raykv.Namespace(model="mine", dtype="bf16", chunk_tokens=4)
OTHER = raykv.Namespace(model="other")


@pytest.fixture
def running(shm_dir) -> Iterator[EmbeddedCluster]:
    with raykv.embedded(2, arena_nbytes="4 MiB", extent_nbytes="64 KiB", heartbeat_s=0.03, shm_dir=shm_dir) as cluster:
        client = cluster.client(MINE)
        client.put(["a", "b"], [bytes(5000)] * 2, chained=False)
        client.put(client.chain(range(12)), [bytes(3000)] * 3)
        client.flush()
        cluster.settle()
        yield cluster


@pytest.fixture
def run(running: EmbeddedCluster, capsys: pytest.CaptureFixture[str]):
    def command(*arguments: str, fails: bool = False) -> str:
        code = main([*arguments, "--node", running.address(1)])
        said = capsys.readouterr()
        assert code == fails, said.err
        return said.err if fails else said.out

    return command


def test_why(run, running, tmp_path):
    lines = run("why", "a", "c").splitlines()
    assert lines[0] == "a: here: 5,000 bytes in the dram of node-0"
    assert lines[1] == "c: never stored (the nodes remember since they were started)"
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*range(8), 99, 98, 97, 96]))
    said = json.loads(run("why", "--tokens", str(prompt), "--json"))
    assert [each["reason"] for each in said] == ["here", "here", "never_stored"]
    assert said[1]["chunk"] == "tokens 4..7"
    salted = run("why", "a", "--namespace", '{"model": "mine", "dtype": "fp8", "chunk_tokens": 4}')
    assert "another namespace (in the dram of node-0); fields that differ: dtype" in salted
    running.client(MINE).delete(["a"])
    key = running.client(MINE).key("a").hex()
    assert run("why", "--keys", key).startswith(f"{key}: deleted 0.")


def test_why_tells_the_trail_of_a_request(run, running):
    client = running.client(MINE)
    client.delete(["a"])
    time.sleep(0.01)
    routed = TrailEntry("abcd-1", time.time(), "routed to b", client.key("a"))
    client.add_to_trail([TrailEntry("chatcmpl-abcd-1", routed.at_s + 1e-3, "engine: 12 prompt tokens"), routed])
    first, absent, second = run("why", "--request", "abcd-1").splitlines()
    assert first.endswith("  routed to b")
    assert "was not found: deleted 0.0 s ago from the dram of node-0, before that" in absent
    assert second.endswith("  engine: 12 prompt tokens")
    said = json.loads(run("why", "--request", "abcd-1", "--json"))
    assert [each["text"] for each in said] == ["routed to b", "engine: 12 prompt tokens"]
    assert said[0]["absent"]["reason"] == "deleted"
    assert "no node knows this request" in run("why", "--request", "abce", fails=True)
    assert "give 4 to 256" in run("why", "--request", "abc", fails=True)


def test_namespaces_are_listed_set_and_dropped(run, running):
    assert "mine (dtype=bf16, chunk_tokens=4): 5 chunks in " in run("namespace", "list")
    wanted = ["ttl_s=500", "policy=lfu", "dram_quota_nbytes=1 MiB"]
    assert "2 nodes have applied it" in run("namespace", "set", "--namespace", "mine", *wanted)
    run("namespace", "set", "--namespace", "mine", "ttl_s=none")
    (said,) = json.loads(run("namespace", "list", "--json"))
    assert NamespaceConfig.load(said["config"]) == NamespaceConfig(policy="lfu", dram_quota_nbytes=1 << 20)
    assert "policy=lfu, dram_quota_nbytes=1048576" in run("namespace", "list")
    assert "5 chunks dropped" in run("namespace", "drop", "--namespace", "mine")
    assert "0 chunks" in run("namespace", "list")
    assert "2 nodes" in run("namespace", "set", "--namespace", '{"model": "new"}', "tiers=ssd")
    listed = run("namespace", "list")
    assert "new: 0 chunks" in listed
    assert "tiers=ssd" in listed


def test_what_is_wrong_is_named(run, running, tmp_path):
    assert "there are 2" in _with_another(run, running, "why", "a")
    assert "not a JSON list" in run("why", "--tokens", _file(tmp_path, '["a"]'), "--namespace", "mine", fails=True)
    assert "32 hexadecimal digits" in run("why", "--keys", "abc", fails=True)
    for wrong in ([], ["a", "--keys", "ab"], ["--keys", "ab", "--tokens", "x"]):
        with pytest.raises(SystemExit):
            run("why", *wrong)
    assert "unknown field 'ttl'" in run("namespace", "set", "--namespace", "mine", "ttl=3", fails=True)
    assert "FIELD=VALUE" in run("namespace", "set", "--namespace", "mine", "ttl", fails=True)
    assert "those in use: mine" in run("namespace", "drop", "--namespace", "nine", fails=True)
    assert "fields as JSON" in run("namespace", "set", "--namespace", "nine", "ttl_s=3", fails=True)
    assert "--namespace" in run("namespace", "drop", "--namespace", "{", fails=True)
    assert main(["namespace", "list", "--node", "unix:/nowhere"]) == 1


def _with_another(run, running, *arguments: str) -> str:
    running.client(OTHER).put(["a"], [b"x"])
    return run(*arguments, fails=True)


def _file(tmp_path, text: str) -> str:
    path = tmp_path / "tokens"
    path.write_text(text)
    return str(path)


def test_status_shows_the_namespaces(running):
    client = running.client(MINE)
    client.get(["a", "b"], [bytearray(5000)] * 2)
    client.get(["c"], [bytearray(5000)])
    client.delete(["a"])
    client.configure(priority=3)
    lines = status_lines(client.stats()["nodes"])
    print("\n".join(lines))
    assert lines[0] == "namespaces:"
    assert "4 chunks in " in lines[1]
    assert ", 2 reads, 1 misses (1 never_stored), 1 gone (1 deleted)" in lines[1]
    assert lines[2] == "    priority=3"
    assert "get of several chunks: half within" in lines[3]
    assert status_lines({"n": {"error": "down"}}) == []


def test_status_says_why_an_arena_does_not_grow(running):
    node = {**running.nodes[0].stats(), "member": True}
    status = {"name": "c", "epoch": 1, "directory": {"pid": 1}, "secret": {"stage": "steady"}, "nodes": {"n": node}}
    assert node["memory_refused"] == ""
    assert len(_table(status).splitlines()) == 4  # cluster, node, two lines of namespaces
    node["memory_refused"] = "the limit is near"
    assert _table(status).splitlines()[2].strip() == "the arena grows no further: the limit is near"


def test_without_a_node_ray_is_asked():
    options = parser().parse_args(["namespace", "list", "--name", "x"])
    assert (options.name, options.node) == ("x", None)
