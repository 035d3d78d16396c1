"""The cluster on real Ray. Two Ray nodes on this machine count as two hosts. Actors are killed with SIGKILL."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

import raykv  # noqa: E402
import raykv.cluster  # noqa: E402
from deployments.local_ray import LocalRay  # noqa: E402
from raykv.tools.cli import parser  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STORAGE = {"arena_nbytes": "64 MiB", "extent_nbytes": "8 MiB", "max_chunks": 8192}
"""With enough rows for small chunks, so that nothing is evicted: lent slots take many rows, and after a restart the
slots of the earlier connections are quarantined too."""
NAMESPACE = raykv.Namespace(model="test")


def memory_files() -> set[str]:
    """Files of the cluster in shared memory. Directories belong to other tests."""
    return {path.name for path in Path("/dev/shm").glob("raykv-test-*") if not path.is_dir()}


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    until_s = time.monotonic() + timeout_s
    problem: Exception | None = None
    while time.monotonic() < until_s:
        try:
            if found := condition():
                return found
        except (raykv.RayKVError, ray.exceptions.RayError) as error:
            problem = error
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout_s} s ({problem})")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[LocalRay]:
    with LocalRay([{}, {}]) as nodes:
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()


@contextmanager
def running(**fields: Any) -> Iterator[dict[str, Any]]:
    """Start a cluster in which every node knows every other. Stop it at the end. `fields`: of ClusterConfig."""
    started = raykv.cluster.start(name="test", storage=STORAGE, separate_hosts=True, **fields)
    try:
        assert {node["epoch"] for node in started["nodes"].values()} == {started["epoch"]}
        for client in clients(started)[1]:
            with client:
                assert len(client.view().members) == 2
        yield started
    finally:
        raykv.cluster.stop("test")
    assert memory_files() == set()


@pytest.fixture
def cluster(local_ray: LocalRay) -> Iterator[dict[str, Any]]:
    with running() as started:
        yield started


def clients(cluster: dict[str, Any]) -> tuple[str, list[raykv.Client]]:
    """Return the id of this process's Ray node, and a client of each node, beginning with this Ray node's."""
    mine = ray.get_runtime_context().get_node_id()
    order = sorted(cluster["nodes"], key=lambda ray_node_id: ray_node_id != mine)
    addresses = [cluster["nodes"][each]["local_address"] for each in order]
    return mine, [raykv.connect(NAMESPACE, address=address) for address in addresses]


class TestWhileNothingFails:
    """Tests that share a cluster, and leave it as it was."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, local_ray: LocalRay) -> Iterator[dict[str, Any]]:
        with running() as started:
            yield started

    def test_a_value_crosses_from_one_node_to_the_other(self, cluster):
        _, (here, there) = clients(cluster)
        with here, there:
            assert here.put(["a", "b"], [b"x" * 5000, b"y" * 5000]).stored == 2
            into = [bytearray(5000), bytearray(5000)]
            wait_for("the owner knows it", lambda: there.match(["a", "b"]).count == 2)
            got = there.get(["a", "b"], into)
        assert got.hits == (True, True)
        assert got.nbytes_by_path == {"tcp": 10000}
        assert into == [b"x" * 5000, b"y" * 5000]

    def test_connect_finds_the_node_of_its_own_ray_node(self, cluster, monkeypatch):
        monkeypatch.delenv("RAYKV_ADDRESS", raising=False)
        mine = ray.get_runtime_context().get_node_id()
        assert raykv.cluster.find_address("test") == cluster["nodes"][mine]["local_address"]

    def test_start_is_idempotent_and_refuses_another_configuration(self, cluster):
        again = raykv.cluster.start(name="test", storage=STORAGE, separate_hosts=True)
        assert {node["pid"] for node in again["nodes"].values()} == {node["pid"] for node in cluster["nodes"].values()}
        assert again["epoch"] == cluster["epoch"]
        with pytest.raises(raykv.ConfigError, match="storage"):
            raykv.cluster.start(name="test", storage={"arena_nbytes": "32 MiB", "extent_nbytes": "8 MiB"})

    def test_two_clusters_of_different_names_are_strangers(self, cluster):
        other = raykv.cluster.start(name="test-other", storage=STORAGE, separate_hosts=True)
        try:
            member = next(iter(cluster["nodes"].values()))
            secret = raykv.cluster.control.secret("test-other")
            with pytest.raises(raykv.PeerUnavailable, match="secret"):
                raykv.connect(NAMESPACE, address=member["address"], secret=secret)
            assert not {node["pid"] for node in other["nodes"].values()} & {n["pid"] for n in cluster["nodes"].values()}
        finally:
            assert raykv.cluster.stop("test-other")


@pytest.mark.parametrize("which", ["pid", "actor_pid"])
def test_a_killed_node_comes_back_with_what_was_committed(cluster, which):
    """Kill the node's own process or its actor. The supervisor restarts the process, and Ray restarts the actor."""
    mine, (here, there) = clients(cluster)
    with here, there:
        assert here.put(["a"], [b"x" * 5000]).stored == 1
        os.kill(cluster["nodes"][mine][which], signal.SIGKILL)
        into = bytearray(5000)
        assert here.get(["a"], [into]).hits == (True,), "local reads need no node process"
        old = cluster["nodes"][mine]
        back = wait_for(
            "the node comes back",
            lambda: (
                (node := raykv.cluster.status("test")["nodes"][mine]).get("member")
                and node["pid"] != old["pid"]
                and node["recovered"]
                and node
            ),
        )
        assert not os.path.exists(f"/proc/{old['pid']}")
        assert (back["actor_pid"] == old["actor_pid"]) == (which == "pid")
        assert back["starts"] == (2 if which == "pid" else 1)
        assert (back["address"] == old["address"]) == (which == "pid")
        assert back["recovered"] == 1
        wait_for("writes go on", lambda: here.put(["b"], [b"z" * 5000]).stored == 1)
        wait_for("the other node finds it again", lambda: there.get(["a"], [into]).hits == (True,))
        assert into == b"x" * 5000


def test_a_node_that_is_paused_leaves_the_view_and_returns(local_ray):
    """Calls of the other host go on meanwhile: with misses, but without errors or wrong bytes."""
    with running(member_timeout_s=1.5) as cluster:
        mine, (here, there) = clients(cluster)
        (other,) = set(cluster["nodes"]) - {mine}
        pid, names, into = cluster["nodes"][other]["pid"], [str(number) for number in range(40)], bytearray(5000)

        def members() -> int:
            return len(here.view().members)

        def turn() -> None:
            name = f"t-{next(turns)}"
            assert here.put([name], [name.encode().ljust(5000)], timeout_s=0.5).stored == 1
            for each in (name, random.choice(names)):
                if here.get([each], [into], timeout_s=0.5).hits[0]:
                    assert into == each.encode().ljust(5000)

        turns = itertools.count()
        with here, there:
            assert there.put(names, [name.encode().ljust(5000) for name in names], chained=False).stored == 40
            wait_for("the owners know them", lambda: all(here.exists(names)))
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_for("the node leaves the view", lambda: turn() or members() == 1)
                for _ in range(20):
                    turn()
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_for("it is a member again", lambda: turn() or members() == 2)
            wait_for("its chunks are found", lambda: turn() or all(here.get([each], [into]).hits[0] for each in names))
            assert raykv.cluster.status("test")["nodes"][other]["pid"] == pid, "it was not restarted"
            stored = [f"t-{number}" for number in range(next(turns))]
            wait_for("it finds what was stored meanwhile", lambda: all(there.exists(stored)))


def test_an_upgrade_under_load_keeps_every_chunk_and_reads_never_stop(cluster):
    """A reader and a writer run while the nodes and the directory are replaced one by one."""
    mine, (here, there) = clients(cluster)
    names = [f"stored-{number}" for number in range(200)]
    values = {name: name.encode().ljust(5000, b".") for name in names}
    stop, misses, wrong, reads, written, refused = threading.Event(), [], [], [0], [], [0]

    def read() -> None:
        into = bytearray(5000)
        while not stop.is_set():
            name = random.choice(names)
            if not here.get_one(here.key(name), memoryview(into)):
                misses.append(name)
            elif into != values[name]:
                wrong.append(name)
            reads[0] += 1

    def write() -> None:
        number = 0
        while not stop.is_set():
            name = f"meanwhile-{number}"
            if here.put([name], [name.encode().ljust(5000, b".")]).stored:
                written.append(name)
            else:
                refused[0] += 1
            number += 1
            stop.wait(0.02)

    with here, there:
        assert here.put(names, list(values.values())).stored == 200
        threads = [threading.Thread(target=read), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        try:
            steps = list(raykv.cluster.upgrade("test"))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        print(f"{reads[0]} reads, {len(written)} puts, {refused[0]} refused; {steps}")
        assert [step["pid"] != step["pid_before"] for step in steps] == [True] * 3
        assert not misses
        assert not wrong
        after = raykv.cluster.status("test")["nodes"]
        assert after[mine]["recovered"] >= 200
        assert after[mine]["evicted"] == 0
        into = bytearray(5000)
        for name in [*names, *written]:  # an owner that has just restarted may not know all holders yet
            wait_for(f"{name} is found", lambda name=name: here.get_one(here.key(name), memoryview(into)))
        wait_for("the other node finds them", lambda: there.match(names).count == 200)


def test_a_drained_node_hands_its_chunks_over_and_comes_back_empty(local_ray):
    with running() as started:
        mine, (here, there) = clients(started)
        other = next(node for node in started["nodes"] if node != mine)
        names, into = [f"chunk-{number}" for number in range(50)], bytearray(5000)
        values = [name.encode().ljust(5000, b".") for name in names]

        def found() -> int:
            return sum(here.get_one(here.key(name), memoryview(into)) for name in names)

        with here, there:
            assert there.put(names, values).stored == 50
            wait_for("the chunks are announced", lambda: found() == 50)
            options = parser().parse_args(["drain", other[:12], "--name", "test", "--rate", "1 GiB"])
            said = options.run(options)
            assert f"node {other[:12]} is drained: 50 chunks moved" in said
            assert "0 left" in said
            wait_for("all are on this node", lambda: found() == 50)
            after = raykv.cluster.status("test")["nodes"]
            assert raykv.cluster.control.is_drained(after[other])
            assert after[mine]["chunks"] == 50
            wait_for("the view has one member", lambda: len(here.view().members) == 1)
            assert all(started["nodes"][other]["node_id"] not in name for name in memory_files())
            options = parser().parse_args(["status", "--name", "test"])
            assert "drained: 50 chunks moved" in options.run(options)
            assert len(list(raykv.cluster.upgrade("test"))) == 2, "the other node, and the directory"
            assert raykv.cluster.start(name="test", storage=STORAGE, separate_hosts=True)["nodes"]
        raykv.cluster.undrain(other[:12], "test")
        _, (here, there) = clients(raykv.cluster.status("test"))
        with here, there:
            wait_for("the node is in the view", lambda: len(here.view().members) == 2)
            wait_for("the chunks are still here", lambda: found() == 50)
        with pytest.raises(raykv.UsageError, match="names 0 nodes"):
            list(raykv.cluster.drain("no such node", "test"))
        for rate in (0.0, float("nan"), float("inf")):
            with pytest.raises(raykv.UsageError, match="nbytes_per_s"):
                list(raykv.cluster.drain(other, "test", nbytes_per_s=rate))


def test_a_killed_directory_comes_back_and_learns_the_view(cluster):
    _, (here, there) = clients(cluster)
    with here, there:
        assert here.put(["a"], [b"x" * 5000]).stored == 1
        os.kill(cluster["directory"]["pid"], signal.SIGKILL)
        assert here.put(["b"], [b"y" * 5000]).stored == 1, "writes need no directory"
        into = bytearray(5000)
        wait_for("reads need no directory", lambda: there.get(["b"], [into]).hits == (True,), timeout_s=5.0)
        back = wait_for(
            "the directory comes back",
            lambda: (
                (found := raykv.cluster.status("test"))["directory"]["pid"] != cluster["directory"]["pid"]
                and all(node.get("member") for node in found["nodes"].values())
                and found
            ),
        )
        assert back["epoch"] >= cluster["epoch"]
        assert {n: x["pid"] for n, x in back["nodes"].items()} == {n: x["pid"] for n, x in cluster["nodes"].items()}


def test_namespaces_outlive_the_directory_and_the_nodes_and_are_dropped_everywhere(cluster):
    _, (here, there) = clients(cluster)
    with here, there:
        assert here.put(["a"], [b"x" * 5000]).stored == there.put(["b"], [b"x" * 5000]).stored == 1
        assert there.configure(policy="lfu", ttl_s=5000) == 2
        with pytest.raises(raykv.ConfigError, match="sieve"):
            there.configure(policy="sieve")
        os.kill(cluster["directory"]["pid"], signal.SIGKILL)
        os.kill(next(iter(cluster["nodes"].values()))["pid"], signal.SIGKILL)
        wanted = raykv.NamespaceConfig(policy="lfu", ttl_s=5000, priority=3)
        wait_for("the directory comes back", lambda: here.configure(priority=3) == 2)

        def on_both() -> bool:
            (found,) = [each for each in here.namespaces() if each["namespace"] == NAMESPACE]
            return found["config"] == wanted and [n["policy"] for n in found["nodes"].values()] == ["lfu"] * 2

        wait_for("both nodes know it", on_both)
        assert "policy=lfu, ttl_s=5000.0, priority=3" in command("namespace", "list", "--name", "test")
        assert "test: 2 chunks" in command("status", "--name", "test")
        why = command("why", "a", "c", "--name", "test").splitlines()
        assert why[0].startswith("a: here: 5,000 bytes in the dram of ")
        assert why[1].startswith("c: never stored")
        assert here.drop_namespace() == 2
        assert "a: dropped " in command("why", "a", "--name", "test")
        assert memory_files() != set()


def test_the_secret_is_rotated_under_load_and_outlives_the_processes(local_ray, authority, monkeypatch):
    """With TLS, whose files all actors and clients find by the config of the cluster."""
    monkeypatch.delenv("RAYKV_ADDRESS", raising=False)
    tls = authority.issue("ray")
    with running(tls=tls) as cluster:
        _, (here, there) = clients(cluster)
        killed = next(iter(cluster["nodes"]))
        address = cluster["nodes"][killed]["address"]

        def connect(secret: str) -> raykv.Client:
            return raykv.connect(NAMESPACE, address=address, secret=secret, tls=tls)

        def rotate(*options: str) -> None:
            said.append(command("secret", "rotate", "--name", "test", *options))

        with here, there:
            assert here.put(["a", "b"], [b"x" * 5000] * 2, chained=False).stored == 2
            wait_for("the owner knows it", lambda: all(there.exists(["a", "b"])))
            said: list[str] = []
            old, reads = list[str](), 0
            for options, words in [(("--keep-former",), "is still accepted"), ((), "the former one is refused")] * 2:
                old.append(raykv.cluster.control.secret("test"))
                thread = threading.Thread(target=rotate, args=options)
                thread.start()
                while thread.is_alive():
                    into = [bytearray(5000), bytearray(5000)]
                    result = there.get(["a", "b"], into)
                    assert result.hits == (True, True)
                    assert "tcp" in result.nbytes_by_path
                    reads += 1
                thread.join()
                assert words in said[-1]
                if options:
                    assert old[-1] != raykv.cluster.control.secret("test")
                    assert "is being rotated" in command("status", "--name", "test")
                    connect(old[-1]).close()
            assert reads > 10
            assert len({*old, raykv.cluster.control.secret("test")}) == 3
            newest = raykv.cluster.control.secret("test")
            assert "rotated" not in command("status", "--name", "test")
            for pid in (cluster["directory"]["pid"], cluster["nodes"][killed]["actor_pid"]):
                os.kill(pid, signal.SIGKILL)
            wait_for("all are back", lambda: len(there.stats()["nodes"]) == 2 and all(there.exists(["a", "b"])))
            wait_for("the directory knows the secret", lambda: raykv.cluster.control.secret("test") == newest)
            wait_for("the chunks are read over TCP", lambda: all(there.get(["a", "b"], into).hits))
            address = wait_for("both are up", lambda: raykv.cluster.status("test")["nodes"][killed].get("address"))
            for secret in {*old} - {newest}:
                with pytest.raises(raykv.TransientError):
                    connect(secret)
            wait_for("a client with the secret", lambda: connect(newest).close() is None)


def test_stop_leaves_nothing_and_says_so_when_there_is_nothing(local_ray):
    raykv.cluster.start(name="test", storage=STORAGE, separate_hosts=True)
    pids = [node["pid"] for node in raykv.cluster.status("test")["nodes"].values()]
    assert len(memory_files()) == 8  # table, arena, socket and view of two nodes
    assert raykv.cluster.stop("test")
    assert memory_files() == set()
    wait_for("the processes end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not raykv.cluster.stop("test")
    with pytest.raises(raykv.PeerUnavailable, match="raykv up"):
        raykv.cluster.status("test")


def test_a_ray_node_that_joins_later_gets_a_node_and_one_that_dies_leaves_the_view(cluster, local_ray):
    number = local_ray.add_node({})
    try:
        joined = wait_for(
            "the new Ray node gets its raykv node",
            lambda: (
                len(nodes := raykv.cluster.status("test")["nodes"]) == 3
                and all(node.get("member") for node in nodes.values())
                and nodes
            ),
        )
        (new,) = set(joined) - set(cluster["nodes"])
    finally:
        local_ray.stop_node(number)
    left = {name for name in memory_files() if joined[new]["node_id"] in name}
    assert left, "nothing removes the memory of a dead Ray node before the cluster ends"
    view_of = {node["local_address"]: node for node in cluster["nodes"].values()}
    with raykv.connect(NAMESPACE, address=next(iter(view_of))) as client:
        wait_for("it leaves the view", lambda: client.stats() and len(client.view().members) == 2)
    assert raykv.cluster.stop("test")
    assert memory_files() == set(), "what the dead Ray node left on this host is removed too"


def command(*arguments: str) -> str:
    """Run a command in this process, which has joined Ray. Returns the command's output."""
    options = parser().parse_args(arguments)
    return str(options.run(options))


def raykv_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, as a user does."""
    whole = [sys.executable, "-m", "raykv.tools.cli", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=120)


def test_the_command_line_starts_shows_and_ends_a_cluster(local_ray):
    up = raykv_command("up", "--name", "test", "--arena", "64 MiB", "--separate-hosts")
    assert up.returncode == 0, up.stderr
    assert up.stdout.count("member") == 2
    status = json.loads(raykv_command("status", "--name", "test", "--json").stdout)
    assert [node["arena_nbytes"] for node in status["nodes"].values()] == [64 << 20] * 2
    secret = command("status", "--name", "test", "--secret").strip()
    member = next(iter(status["nodes"].values()))
    with raykv.connect(NAMESPACE, address=member["address"], secret=secret) as client:
        assert len(client.view().members) == 2
    down = raykv_command("down", "--name", "test")
    assert (down.returncode, down.stdout) == (0, "cluster 'test' is down\n")
    assert memory_files() == set()
    again = raykv_command("status", "--name", "test")
    assert again.returncode == 1
    assert "raykv up" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--policy", "mru"], r"field 'storage\.policy'"),
        (["--arena", "4 GB"], r"field 'storage\.arena_nbytes'"),
        (["--ssd", "/tmp"], "--ssd-size belong together"),
        (["--ssd", "/tmp", "--ssd-size", "1 KiB"], r"field 'storage\.ssd"),
        (["--name", "test", "--arena", "900 TiB"], "field 'arena_nbytes'"),
    ],
)
def test_the_command_line_names_what_is_wrong(local_ray, arguments: list[str], names: str):
    try:
        with pytest.raises(raykv.ConfigError, match=names):
            command("up", *arguments)
    finally:
        raykv.cluster.stop("test")


def test_a_ray_node_that_is_about_to_end_is_drained(cluster):
    """Ray announces the end of a node before a scale-down, and after a notice of preemption.

    The last test of this file, because the Ray node ends.
    """
    mine, (here, there) = clients(cluster)
    other = next(node for node in cluster["nodes"] if node != mine)
    with here, there:
        names = [f"chunk-{number}" for number in range(20)]
        assert there.put(names, [bytes(5000)] * 20).stored == 20
        preemption, deadline_ms = 2, int(time.time() * 1000) + 60_000  # DRAIN_NODE_REASON_PREEMPTION
        gcs = ray._private.worker.global_worker.gcs_client
        accepted, why = gcs.drain_node(other, preemption, "a test", deadline_ms)
        assert accepted, why

        def drained() -> bool:
            nodes = raykv.cluster.status("test")["nodes"]
            return other not in nodes or raykv.cluster.control.is_drained(nodes[other])

        wait_for("the node is drained", drained)
        wait_for("its chunks are here", lambda: here.exists(names).sum() == 20)
