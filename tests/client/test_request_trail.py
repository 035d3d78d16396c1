"""The trail of a request: what routers and engines say of it, from all nodes."""

import threading
import time

import pytest

import raykv
from raykv.client.request_trail import MAX_WAITING, TrailSender
from raykv.embedded import EmbeddedCluster
from raykv.errors import PeerUnavailable, UsageError
from raykv.node.request_trails import ENTRIES, RequestTrails
from raykv.protocol.request_trail import MAX_ENTRIES, MAX_TEXT, TrailEntry

SPACE = raykv.Namespace(model="m", dtype="bf16", chunk_tokens=4)


def cluster(nodes: int) -> EmbeddedCluster:
    return raykv.embedded(nodes, arena_nbytes="1 MiB", extent_nbytes="64 KiB", heartbeat_s=0.03)


def entry(name: str, at_s: float, text: str = "text", absent: bytes = b"") -> TrailEntry:
    return TrailEntry(name, at_s, text, absent)


def test_the_entries_of_all_nodes_are_read_in_the_order_of_time():
    with cluster(2) as running:
        first, second = running.client(SPACE), running.client(SPACE, node=1)
        first.add_to_trail([entry("chatcmpl-abcd-1", 2.0, "computed"), entry("other", 1.5)])
        second.add_to_trail([entry("abcd", 1.0, "routed"), entry("chatcmpl-abcd-1", 3.0, "decoded")])
        for client in (first, second):
            found = client.trail("abcd")
            assert [(each.at_s, each.text) for each in found] == [(1.0, "routed"), (2.0, "computed"), (3.0, "decoded")]
            assert [each.node for each in found] == ["node-1", "node-0", "node-1"]
            assert client.trail("nobody") == []
        for wrong in ("abc", "", "x" * 257):
            with pytest.raises(UsageError, match="request_id"):
                first.trail(wrong)


def test_what_had_become_of_the_missing_chunk_before_the_request():
    """Departures after the request do not count, and a chunk that is back does not hide how it had left."""
    with cluster(2) as running:
        client = running.client(SPACE)
        client.put(["gone", "later"], [bytes(3000)] * 2, chained=False)
        client.flush()
        client.delete(["gone"])
        time.sleep(0.05)
        now_s = time.time()
        client.put(["gone"], [bytes(3000)], chained=False)
        client.flush()
        time.sleep(0.05)
        client.delete(["later"])
        client.add_to_trail(
            [
                entry("request-1", now_s, absent=client.key("gone")),
                entry("request-1", now_s + 1e-3, absent=client.key("later")),
                entry("request-1", now_s + 2e-3, absent=client.key("never")),
                entry("request-1", now_s + 3e-3, absent=b"short"),
            ]
        )
        gone, later, never, short = (each.absent for each in client.trail("request-1"))
        assert gone is not None
        assert (gone.reason, gone.node, gone.tier) == ("deleted", "node-0", "dram")
        assert gone.ago_s is not None
        assert 0.04 < gone.ago_s < 5.0
        assert (later, never, short) == (None, None, None)


def test_a_node_forgets_the_oldest():
    trails = RequestTrails()
    for number in range(ENTRIES + 10):
        trails.add([entry(f"request-{number:05}", 1.0)])
    assert trails.find("request-00009") == []
    assert len(trails.find("request-00010")) == 1
    assert [each.request_id for each in trails.find("request-")][-1] == f"request-{ENTRIES + 9:05}"
    assert len(trails.find("request-")) == MAX_ENTRIES


def test_entries_that_wait_go_together_and_are_bounded():
    sent: list[list[TrailEntry]] = []
    may_send, is_sending = threading.Event(), threading.Event()

    def send(entries: list[TrailEntry]) -> None:
        sent.append(entries)
        is_sending.set()
        assert may_send.wait(10.0)
        if len(sent) == 2:
            raise PeerUnavailable("away")

    sender = TrailSender(send)
    sender.add("first", "x" * 5000, absent=bytes(16))
    assert is_sending.wait(10.0)
    for number in range(MAX_WAITING + 3):
        sender.add(f"{number}" * 300 if number == 5 else f"{number}", "text")
    may_send.set()
    sender.close()
    assert [len(each) for each in sent] == [1, *[MAX_ENTRIES] * (MAX_WAITING // MAX_ENTRIES)]
    assert (len(sent[0][0].text), sent[0][0].absent) == (MAX_TEXT, bytes(16))
    assert sent[1][0].request_id == "3", "the oldest are dropped"
    assert len(sent[1][2].request_id) == 256
    sender.add("closed", "text")  # dropped in silence
