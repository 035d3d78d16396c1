"""The list of namespaces, which the directory keeps and nodes copy."""

import json
import random

import pytest

from raykv.config import NamespaceConfig
from raykv.errors import CapacityError, ConfigError, UsageError
from raykv.membership.membership import Membership
from raykv.membership.namespace_registry import MAX_ENTRIES, Entry, NamespaceRegistry
from raykv.memory.layout import NAMESPACE_TEXT_NBYTES
from raykv.protocol import codec
from raykv.protocol.messages import Heartbeat
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member
from tests.support.protocol import change

A, B = Namespace(model="a", chunk_tokens=16), Namespace(model="b", extra={"x": "1", "y": "2"})


def member(name: str) -> Member:
    return Member(name, "h", {"tcp": f"{name}:1"}, 1.0, 1)


def test_fields_change_one_by_one():
    registry = NamespaceRegistry()
    registry.configure(A, {"ttl_s": 60, "policy": "fifo"}, now_ns=1)
    registry.configure(A.with_fields(salt="s"), {"ttl_s": None, "dram_quota_nbytes": "1 GiB"}, now_ns=2)
    assert registry.config(A.digest) == NamespaceConfig(policy="fifo", dram_quota_nbytes=1 << 30)
    assert registry.config(B.digest) == NamespaceConfig()
    assert registry.version == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttl": 1}, "unknown field 'ttl'; NamespaceConfig has: dram_quota_nbytes, placement, policy"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"policy": "sieve"}, "field 'policy': .*there are: leaf_lru"),
        ({"tiers": "tape"}, "tiers"),
        ({"dram_quota_nbytes": "5 GB"}, "5 GB.*4 GiB"),
        ({"priority": 101}, "priority"),
        ({"placement": "anywhere"}, "placement.*'local' or 'spread'"),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    registry = NamespaceRegistry()
    with pytest.raises(ConfigError, match=words):
        registry.configure(A, fields, now_ns=1)
    assert not registry.entries


def test_a_drop_ends_the_config_and_is_remembered():
    registry = NamespaceRegistry()
    registry.configure(A, {"ttl_s": 60}, now_ns=5)
    registry.drop(A, now_ns=3)  # the clock went back
    entry = registry.entries[A.digest]
    assert (entry.config, entry.listed, entry.dropped_ns > 5) == (NamespaceConfig(), False, True)
    registry.configure(A, {"ttl_s": 30}, now_ns=10)
    again = registry.entries[A.digest]
    assert (again.config.ttl_s, again.listed, again.dropped_ns) == (30, True, entry.dropped_ns)


@pytest.mark.slow
def test_it_is_bounded():
    registry = NamespaceRegistry()
    for number in range(MAX_ENTRIES):
        registry.configure(Namespace(model=str(number)), {}, now_ns=number + 1)
    with pytest.raises(CapacityError, match="drop one"):
        registry.configure(A, {}, now_ns=5000)
    for number in range(2 * MAX_ENTRIES):
        registry.drop(Namespace(model=str(number)), now_ns=10_000 + number)
    assert len(registry.entries) == MAX_ENTRIES
    assert len(NamespaceRegistry.decode(registry.encode()).entries) == MAX_ENTRIES


@pytest.mark.slow
def test_a_trimmed_entry_does_not_come_back_from_another_copy():
    """The directory must not take trimmed entries back from a node. Otherwise the list would grow without end."""
    registry, node = NamespaceRegistry(), NamespaceRegistry()
    for number in range(MAX_ENTRIES + 700):
        registry.drop(Namespace(model=str(number)), now_ns=10_000 + number)
        if number % 100 == 99:
            for entry in node.newer(registry):  # a node takes over entries in this way
                node.entries = {**node.entries, entry.namespace.digest: entry}
            node.trim()
            node.version = registry.version
            registry.merge(node)
            assert registry.version == node.version, "there was nothing new"
    assert len(registry.entries) == MAX_ENTRIES
    node.entries[A.group.digest] = Entry(A.group, NamespaceConfig(), 5, 5)
    node.merge(registry)
    registry.merge(node)
    assert node.entries == registry.entries
    assert len(NamespaceRegistry.decode(node.encode()).entries) == MAX_ENTRIES
    assert A.group.digest not in registry.entries
    registry.configure(A, {"ttl_s": 5}, now_ns=6)  # an entry with a config is never trimmed
    node.merge(registry)
    assert node.config(A.group.digest).ttl_s == 5


def test_written_and_read():
    registry = NamespaceRegistry()
    registry.configure(A, {"ttl_s": 60, "policy": "own:policy", "tiers": "ssd"}, now_ns=5)
    registry.drop(B, now_ns=6)
    assert NamespaceRegistry.decode(registry.encode()) == registry
    for text in (b"", b"[]", b'{"version": 1}', b'{"version": 1, "entries": [{}]}', registry.encode()[:-9]):
        with pytest.raises(UsageError, match="list of namespaces"):
            NamespaceRegistry.decode(text)


def test_bytes_that_are_not_a_list_raise_usage_error(rng: random.Random):
    """A node reads the list from a file when it starts. A damaged file must not stop it."""
    registry = NamespaceRegistry()
    registry.configure(A, {"ttl_s": 60, "policy": "own:policy"}, now_ns=5)
    registry.drop(B, now_ns=6)
    good = registry.encode()
    hostile = [good.replace(b'"a"', b'"\xff"'), good.replace(b'"a"', b'"\\ud800"'), b"\xfe\xff", b"[" * 100_000]
    for _ in range(2000):
        text = bytearray(good)
        match rng.randrange(4):
            case 0:
                text = text[: rng.randrange(len(text))]
            case 1:
                text = bytearray(rng.randbytes(rng.randrange(1, 200)))
            case 2:
                text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
            case 3:
                at = rng.randrange(len(text))
                text[at : at + rng.randrange(9)] = rng.choice([b"-1", b"null", b"1e400", b"9" * 400, b"\xc0\x80", b'"'])
        hostile.append(bytes(text))
    for text in hostile:
        try:
            NamespaceRegistry.decode(text).encode()
        except UsageError:
            pass


def test_a_namespace_that_no_node_could_open_is_refused():
    """Otherwise a list of 2 048 entries could take any amount of memory of the directory and of all nodes."""
    huge = Namespace(model="x" * NAMESPACE_TEXT_NBYTES)
    registry = NamespaceRegistry()
    for change_it in (
        lambda: registry.configure(huge, {"priority": 3}, now_ns=1),
        lambda: registry.drop(huge, now_ns=1),
    ):
        with pytest.raises(UsageError, match="shorten a field"):
            change_it()
    registry.configure(A, {"priority": 3}, now_ns=1)
    forged = registry.encode().replace(b'"a"', b'"' + huge.model.encode() + b'"')
    with pytest.raises(UsageError, match="shorten a field"):
        NamespaceRegistry.decode(forged)
    with pytest.raises(ConfigError, match="policy"):
        registry.configure(A, {"policy": "a:" + "b" * 1000}, now_ns=2)


@pytest.mark.parametrize("number", [1 << 63, 1 << 64, 10**30, 10**4299, 10**4300 - 1], ids=range(5))
def test_numbers_without_end_do_not_stop_later_changes(number: int):
    """A forged list must not make a later heartbeat or a later list one that cannot be encoded."""
    registry = NamespaceRegistry()
    registry.configure(A, {"priority": 3}, now_ns=5)
    (entry,) = json.loads(registry.encode())["entries"]
    with_limit = {**entry, "changed_ns": number, "dropped_ns": number}
    forged = json.dumps({"version": number, "entries": [entry, {**with_limit, "namespace": {"model": "b"}}]})
    directory = Membership(member_timeout_s=5.0)
    heartbeat = Heartbeat(member("n"), 0, version=1, registry=forged.encode())
    directory.beat(heartbeat, now_s=1.0)
    directory.configure(change(A, {"priority": 4}), now_ns=6)
    directory.configure(change(Namespace(model="b"), None), now_ns=6)
    answer = directory.beat(Heartbeat(member("m"), 0), now_s=2.0)
    assert answer.registry is not None
    copy = NamespaceRegistry.decode(answer.registry)
    assert copy.config(A.digest).priority == 4
    codec.encode(Heartbeat(member("n"), 0, version=copy.version), 0, 0)


def test_copies_that_merge_agree(rng: random.Random):
    copies = [NamespaceRegistry() for _ in range(4)]
    for now_ns in range(300):
        copy = rng.choice(copies)
        match rng.randrange(4):
            case 0:
                copy.configure(rng.choice([A, B]), {"ttl_s": now_ns + 1}, now_ns=now_ns)
            case 1:
                copy.drop(rng.choice([A, B]), now_ns=now_ns)
            case _:
                copy.merge(rng.choice(copies))
    for _ in range(3):
        for one in copies:
            for other in copies:
                one.merge(other)
    assert all(copy.entries == copies[0].entries for copy in copies)
    assert all(copy.entries[space.digest].dropped_ns for copy in copies for space in (A, B))


def test_the_directory_sends_the_list_and_learns_from_nodes():
    directory, node = Membership(member_timeout_s=5.0), member("n")
    assert directory.beat(Heartbeat(node, 0), now_s=0.0).registry is None
    text = directory.configure(change(A, {"ttl_s": 60}), now_ns=1)
    answer = directory.beat(Heartbeat(node, 1), now_s=0.0)
    assert (answer.registry, answer.want_registry) == (text, False)
    mine = NamespaceRegistry.decode(text)
    assert directory.beat(Heartbeat(node, 1, version=mine.version), now_s=0.0).want_registry, "it may know more"
    answer = directory.beat(Heartbeat(node, 1, version=mine.version, registry=text), now_s=0.0)
    assert (answer.registry, answer.want_registry) == (None, False)
    restarted = Membership(member_timeout_s=5.0)
    restarted.configure(change(B, {"ttl_s": 30}), now_ns=2)
    answer = restarted.beat(Heartbeat(node, 1, version=mine.version), now_s=0.0)
    assert answer.want_registry
    answer = restarted.beat(Heartbeat(node, 1, version=mine.version, registry=mine.encode()), now_s=0.0)
    both = NamespaceRegistry.decode(answer.registry)
    assert {entry.config.ttl_s for entry in both.entries.values()} == {60, 30}
    assert both.version > mine.version
    other = member("o")
    assert restarted.beat(Heartbeat(other, 0), now_s=0.0).registry == answer.registry


def test_a_restarted_directory_builds_on_the_list_of_the_calling_node():
    known = Membership(member_timeout_s=5.0).configure(change(A, {"policy": "lfu", "ttl_s": 60}), now_ns=1)
    restarted = Membership(member_timeout_s=5.0)
    changed = NamespaceRegistry.decode(restarted.configure(change(A, {"priority": 3}, known), now_ns=2))
    assert changed.config(A.group.digest) == NamespaceConfig(policy="lfu", ttl_s=60, priority=3)
    assert changed.version > NamespaceRegistry.decode(known).version
    dropped = NamespaceRegistry.decode(Membership(member_timeout_s=5.0).configure(change(B, None, known), now_ns=2))
    assert dropped.config(A.group.digest) == NamespaceConfig(policy="lfu", ttl_s=60)
