"""Targets: text that users, operators, other nodes or files bring."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec

from raykv.config import ClientConfig, ClusterConfig, Model, NamespaceConfig, NodeConfig, StorageConfig, parse_nbytes
from raykv.errors import ConfigError, NamespaceMismatch, ProtocolError, UsageError
from raykv.integrations.vllm import hints as vllm_hints
from raykv.membership.namespace_registry import MAX_ENTRIES, NamespaceRegistry
from raykv.planner.trace import parse_trace
from raykv.protocol import codec, messages
from raykv.protocol.namespace import DIGEST_NBYTES, Namespace
from raykv.protocol.ticket import Ticket
from raykv.protocol.trace_requests import TracedRequest
from raykv.supervisor.process import NodeReport, NodeSpec
from raykv.transport.addresses import parse_address
from tests.fuzz.base import fuzzed
from tests.support.nodes import SPACE
from tests.support.protocol import EXAMPLES

WANTED = 100
MAX_HINT_S = 3600.0
CONFIGS: tuple[type[Model], ...] = (NodeConfig, StorageConfig, ClusterConfig, ClientConfig, NamespaceConfig)
NAMESPACE = SPACE.with_fields(revision="r1", chunk_tokens=16, tp_size=2, lora="a", salt="s", extra={"x": "y"})


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def any_json(data: bytes) -> Any:
    """Decode JSON as a web server does before raykv sees it. Other bytes are not this target's subject."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UsageError("not JSON") from None


def tickets() -> list[bytes]:
    long = Ticket.of(NAMESPACE, ["a", "a", None, "b"] * 20)
    return [text(Ticket.of(NAMESPACE, ["a", "b"]).to_json()), text(long.to_json()), text({"ticket": 1})]


@fuzzed(tickets, ConfigError, NamespaceMismatch, UsageError)
def ticket(data: bytes) -> None:
    """A ticket from an HTTP request. It never names more chunks than were wanted."""
    made = Ticket.from_json(any_json(data))
    assert Ticket.from_json(made.to_json()) == made
    match = made.match(NAMESPACE, WANTED)
    assert match.count == len(match.holders) <= WANTED
    assert all(match.holders)


def namespaces() -> list[bytes]:
    return [NAMESPACE.model_dump_json().encode(), b'{"model":"m"}', SPACE.model_dump_json().encode()]


@fuzzed(namespaces, UsageError)
def namespace(data: bytes) -> None:
    """A namespace in a message."""
    made = Namespace.load(codec.fields(data))
    assert len(made.digest) == DIGEST_NBYTES
    assert made.group.salt == made.group.lora == ""
    assert Namespace.load(codec.fields(made.model_dump_json().encode())).digest == made.digest


def registries() -> list[bytes]:
    made = NamespaceRegistry()
    made.configure(NAMESPACE, {"ttl_s": 60, "policy": "fifo", "dram_quota_nbytes": "1 GiB"}, now_ns=5)
    made.drop(SPACE, now_ns=7)
    return [made.encode(), NamespaceRegistry().encode()]


@fuzzed(registries, UsageError)
def registry(data: bytes) -> None:
    """A list of namespaces in a message or a file. It merges with another, which can then be changed and sent."""
    theirs = NamespaceRegistry.decode(data)
    assert len(theirs.entries) <= 2 * MAX_ENTRIES
    assert NamespaceRegistry.decode(theirs.encode()) == theirs
    ours = NamespaceRegistry.decode(registries()[0])
    ours.merge(theirs)
    for space in (NAMESPACE, SPACE, *(entry.namespace for entry in theirs.entries.values())):
        ours.configure(space, {"priority": 3}, now_ns=9)
        ours.drop(space, now_ns=9)
    copy = NamespaceRegistry.decode(ours.encode())
    codec.encode(messages.Heartbeat(EXAMPLES_MEMBER, 0, version=copy.version, registry=copy.encode()), 0, 0)


EXAMPLES_MEMBER = next(each.member for each in EXAMPLES if isinstance(each, messages.Heartbeat))


def configs() -> list[bytes]:
    storage = {"arena_nbytes": "1 GiB", "ssd": {"paths": ["/a"], "capacity_nbytes": "1 TiB"}, "policy": "lfu"}
    shared = {"file": {"path": "/b", "capacity_nbytes": 1 << 30, "pack_nbytes": "1 MiB"}, "tiers": {"toy": {"a": 1}}}
    return [
        b"\0" + text({"node_id": "n", "bind": "127.0.0.1:0", "storage": storage}),
        b"\1" + text({**storage, **shared}),
        b"\2" + text({"arena_share": 0.5, "storage": storage}),
        b"\3" + text({"address": "a:1", "secret": "00ff", "verify": "always", "copy_threads": 3}),
        b"\4" + text({"ttl_s": 60, "policy": "own:policy", "tiers": "ssd", "dram_quota_nbytes": "1 GiB"}),
    ]


@fuzzed(configs, UsageError)
def config(data: bytes) -> None:
    """A config as JSON. The first byte chooses which."""
    kind = CONFIGS[int.from_bytes(data[:1]) % len(CONFIGS)]
    made = kind.load(codec.fields(data[1:]))
    assert kind.load(made.model_dump()) == made
    if isinstance(made, NodeConfig):
        assert made.local_address.startswith("unix:")
    if isinstance(made, StorageConfig):
        assert made.extents > 0
        assert made.rows > 0


def sizes() -> list[bytes]:
    return [b"64 GiB", b"1.5 TiB", b"17", b"0", b"512 MiB ", b"1 GB"]


@fuzzed(sizes, ValueError)
def size(data: bytes) -> None:
    """A size as text."""
    found = parse_nbytes(data.decode("latin-1"))
    assert isinstance(found, int)
    assert found >= 0


def addresses() -> list[bytes]:
    return [b"host:1", b"[::1]:80", b"unix:/a/b", b"unix:@name", b"unix:", b":1"]


@fuzzed(addresses, ConfigError)
def address(data: bytes) -> None:
    """The address of a member. Connecting to it must fail in the way that callers expect."""
    parse_address(data.decode("latin-1"))


def traces() -> list[bytes]:
    mooncake = {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]}
    ours = {"at_s": 12.5, "tokens": 32, "output_tokens": 20, "chunk_tokens": 16, "keys": ["9f", "a0"]}
    blocks = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [], "block_size": 16}
    stored = {"type": "BlockStored", **blocks}
    removed = {"type": "BlockRemoved", "block_hashes": [1]}
    as_list = [1.5, [["BlockStored", [3, 4], 2, [], 16], ["AllBlocksCleared"]], 0]
    lines = [
        [mooncake, {**mooncake, "timestamp": 27483}],
        [ours, {**ours, "at_s": 13.0}],
        [{"ts": 1.0, "events": [stored, removed]}, as_list],
        [as_list],
    ]
    return [b"\n".join(map(text, some)) for some in lines]


@fuzzed(traces, UsageError)
def trace(data: bytes) -> None:
    """A trace for the planner, as a file of lines."""
    made = parse_trace(data.split(b"\n"))
    assert made.chunks > 0
    for request in made.requests:
        assert all(0 <= chunk < made.chunks for chunk in request.chunks)
        assert sum(made.tokens_of(request)) <= max(request.tokens, 0)
    assert made.seconds >= 0


def recorded() -> list[bytes]:
    request = TracedRequest(12.5, 16, b"k" * 32)
    return [msgspec.msgpack.encode([request, request]), msgspec.msgpack.encode([TracedRequest(0.0, 1, b"")])]


_requests: msgspec.msgpack.Decoder[list[TracedRequest]] = msgspec.msgpack.Decoder(list[TracedRequest])


@fuzzed(recorded, msgspec.MsgspecError, UnicodeDecodeError, UsageError, ProtocolError)
def recording(data: bytes) -> None:
    """Requests that clients report to a node which records a trace. `raykv record` writes them as lines."""
    lines = [each.line() for each in _requests.decode(data)]
    assert all("\n" not in line for line in lines)
    parse_trace(lines)


def hinted() -> list[bytes]:
    own = {"raykv_hints": {"ttl_s": 60, "priority": 3, "pin_s": 9, "session_end": True, "store_decode": False}}
    kinds = [("kv.retain", {"priority": 3, "ttl_seconds": 60}), ("kv.evict", {"session_id": "a"}), ("raykv.hints", {})]
    actions = [{"action_type": kind, "action_version": "1.0", "payload": payload} for kind, payload in kinds]
    envelope = {"protocol_version": "1.0", "actions": actions}
    return [text([own, None, "session"]), text([None, envelope, None]), text([own, envelope, "s"])]


@fuzzed(hinted, UsageError)
def hints(data: bytes) -> None:
    """Hints of a request to vLLM: `kv_transfer_params`, `kv_hints`, `session_id`. A wrong hint is never an error."""
    params, envelope, session = (*(found if isinstance(found := any_json(data), list) else [found]), 0, 0, 0)[:3]
    request: Any = SimpleNamespace(kv_transfer_params=params, kv_hints=envelope, session_id=session)
    parsed = vllm_hints.parse(request, MAX_HINT_S)
    assert 0 <= parsed.hints.ttl_s <= MAX_HINT_S
    assert parsed.hints.retention is None or 0 < parsed.hints.retention[0] <= MAX_HINT_S
    assert all(len(line) < 1000 for line in parsed.ignored)


def supervised() -> list[bytes]:
    spec = NodeSpec(NodeConfig(node_id="n").model_dump(mode="json"), "5e" * 32, "127.0.0.1:1", "5f" * 32)
    return [b"\0" + msgspec.json.encode(spec), b"\1" + msgspec.json.encode(NodeReport(3, "unix:/a"))]


@fuzzed(supervised, msgspec.MsgspecError, UnicodeDecodeError, ConfigError)
def supervisor(data: bytes) -> None:
    """A line on the pipes between a supervisor and its owner. Both are of one user, and end at an error."""
    if data[:1] == b"\0":
        spec = msgspec.json.decode(data[1:], type=NodeSpec)
        NodeConfig.load(spec.config)
    else:
        assert isinstance(msgspec.json.decode(data[1:], type=NodeReport).pid, int)
