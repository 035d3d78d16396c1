"""The list of namespaces: what the directory keeps and nodes copy."""

import random

import pytest

from raykv.config import NamespaceConfig
from raykv.errors import CapacityError, ConfigError, UsageError
from raykv.membership.membership import Directory
from raykv.membership.namespace_registry import MAX_ENTRIES, Entry, Register
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member

A, B = Namespace(model="a", chunk_tokens=16), Namespace(model="b", extra={"x": "1", "y": "2"})


def member(name: str) -> Member:
    return Member(name, "h", f"{name}:1", f"unix:/{name}", 1.0, 1)


def test_fields_change_one_by_one():
    register = Register()
    register.configure(A, {"ttl_s": 60, "policy": "fifo"}, now_ns=1)
    register.configure(A.with_fields(salt="s"), {"ttl_s": None, "dram_quota_nbytes": "1 GiB"}, now_ns=2)
    assert register.config(A.digest) == NamespaceConfig(policy="fifo", dram_quota_nbytes=1 << 30)
    assert register.config(B.digest) == NamespaceConfig()
    assert register.version == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttl": 1}, "unknown field 'ttl'; NamespaceConfig has: chunk_tokens, dram_quota_nbytes, policy"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"policy": "sieve"}, "field 'policy': .*there are: leaf_lru"),
        ({"tiers": "tape"}, "tiers"),
        ({"dram_quota_nbytes": "5 GB"}, "5 GB.*4 GiB"),
        ({"priority": 101}, "priority"),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    register = Register()
    with pytest.raises(ConfigError, match=words):
        register.configure(A, fields, now_ns=1)
    assert not register.entries


def test_the_chunk_size_is_part_of_the_namespace():
    register = Register()
    register.configure(A, {"chunk_tokens": 16}, now_ns=1)
    with pytest.raises(UsageError, match=r"16\D*tokens; keys depend on it, so use another namespace: with_fields"):
        register.configure(A, {"chunk_tokens": 32}, now_ns=1)


def test_a_drop_ends_the_config_and_is_remembered():
    register = Register()
    register.configure(A, {"ttl_s": 60}, now_ns=5)
    register.drop(A, now_ns=3)  # the clock went back
    entry = register.entries[A.digest]
    assert (entry.config, entry.listed, entry.dropped_ns > 5) == (NamespaceConfig(), False, True)
    register.configure(A, {"ttl_s": 30}, now_ns=10)
    again = register.entries[A.digest]
    assert (again.config.ttl_s, again.listed, again.dropped_ns) == (30, True, entry.dropped_ns)


@pytest.mark.slow
def test_it_is_bounded():
    register = Register()
    for number in range(MAX_ENTRIES):
        register.configure(Namespace(model=str(number)), {}, now_ns=number)
    with pytest.raises(CapacityError, match="drop one"):
        register.configure(A, {}, now_ns=5000)
    for number in range(2 * MAX_ENTRIES):
        register.drop(Namespace(model=str(number)), now_ns=10_000 + number)
    assert len(register.entries) == MAX_ENTRIES
    assert len(Register.decode(register.encode()).entries) == MAX_ENTRIES


@pytest.mark.slow
def test_what_one_has_forgotten_does_not_come_back_from_another():
    """Else the list grows until nobody can follow it, as the directory takes from nodes what it has just forgotten."""
    register, node = Register(), Register()
    for number in range(MAX_ENTRIES + 700):
        register.drop(Namespace(model=str(number)), now_ns=10_000 + number)
        if number % 100 == 99:
            for entry in node.newer(register):  # as `Namespaces.adopt`
                node.entries = {**node.entries, entry.namespace.digest: entry}
            node.forget()
            node.version = register.version
            register.merge(node)
            assert register.version == node.version, "there was nothing new"
    assert len(register.entries) == MAX_ENTRIES
    node.entries[A.group.digest] = Entry(A.group, NamespaceConfig(), 5, 5, listed=False)
    node.merge(register)
    register.merge(node)
    assert node.entries == register.entries
    assert len(Register.decode(node.encode()).entries) == MAX_ENTRIES
    assert A.group.digest not in register.entries
    register.configure(A, {"ttl_s": 5}, now_ns=6)  # what has a config is never forgotten
    node.merge(register)
    assert node.config(A.group.digest).ttl_s == 5


def test_written_and_read():
    register = Register()
    register.configure(A, {"ttl_s": 60, "policy": "own:policy", "tiers": "ssd"}, now_ns=5)
    register.drop(B, now_ns=6)
    assert Register.decode(register.encode()) == register
    for text in (b"", b"[]", b'{"version": 1}', b'{"version": 1, "entries": [{}]}', register.encode()[:-9]):
        with pytest.raises(UsageError, match="list of namespaces"):
            Register.decode(text)


def test_copies_that_meet_agree(rng: random.Random):
    copies = [Register() for _ in range(4)]
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


def test_the_directory_tells_nodes_and_learns_from_them():
    directory, node = Directory(member_timeout_s=5.0), member("n")
    assert directory.beat(node, 0, None, now_s=0.0).register is None
    text = directory.configure(A, {"ttl_s": 60}, now_ns=1)
    pulse = directory.beat(node, 1, None, now_s=0.0)
    assert (pulse.register, pulse.tell_register) == (text, False)
    mine = Register.decode(text)
    assert directory.beat(node, 1, None, now_s=0.0, version=mine.version).tell_register, "it may know more than we"
    pulse = directory.beat(node, 1, None, now_s=0.0, version=mine.version, register=text)
    assert (pulse.register, pulse.tell_register) == (None, False)
    reborn = Directory(member_timeout_s=5.0)
    reborn.configure(B, {"ttl_s": 30}, now_ns=2)
    pulse = reborn.beat(node, 1, None, now_s=0.0, version=mine.version)
    assert pulse.tell_register
    pulse = reborn.beat(node, 1, None, now_s=0.0, version=mine.version, register=mine.encode())
    both = Register.decode(pulse.register)
    assert {entry.config.ttl_s for entry in both.entries.values()} == {60, 30}
    assert both.version > mine.version
    other = member("o")
    assert reborn.beat(other, 0, None, now_s=0.0).register == pulse.register


def test_a_reborn_directory_builds_a_change_on_what_the_asking_node_knows():
    known = Directory(member_timeout_s=5.0).configure(A, {"policy": "lfu", "ttl_s": 60}, now_ns=1)
    reborn = Directory(member_timeout_s=5.0)
    told = Register.decode(reborn.configure(A, {"priority": 3}, known, now_ns=2))
    assert told.config(A.group.digest) == NamespaceConfig(policy="lfu", ttl_s=60, priority=3)
    assert told.version > Register.decode(known).version
    dropped = Register.decode(Directory(member_timeout_s=5.0).configure(B, None, known, now_ns=2))
    assert dropped.config(A.group.digest) == NamespaceConfig(policy="lfu", ttl_s=60)
