"""One example of every message, with a value in every field."""

import json
from typing import Any

from raykv.protocol import messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.heat import CopyOrder, HeatOrders, HeatReport, HotPrefix
from raykv.protocol.keyring import Keyring
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.protocol.rdma import QueuePairEnd
from raykv.protocol.request_trail import TrailEntry
from raykv.protocol.trace_requests import TracedRequest


def member(name: str = "a", *, host: str = "h", weight: float = 1.0, incarnation: int = 1) -> Member:
    return Member(name, host, {"tcp": f"{name}:1", "unix": f"unix:/{name}"}, weight, incarnation)


def change(namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> messages.Configure:
    """Return the request to change a namespace's config. If `fields` is None, the request drops the namespace."""
    text = None if fields is None else json.dumps(fields).encode()
    return messages.Configure(namespace.model_dump_json().encode(), text, registry)


VIEW = View(3, (member("a", weight=1.5, incarnation=7), member("b", weight=0.5, incarnation=1 << 60)))
RUN = messages.Run(b"keys", 4096, b"rows", b"sums", b"places", False, b"parent", 9, 7, 60.0, -3)
HEAT = HeatReport(2e9, (HotPrefix(b"h" * KEY_NBYTES, 1e9, 7, True),))
ORDERS = HeatOrders((CopyOrder(b"h" * KEY_NBYTES, ("b", "c")),), (b"i" * KEY_NBYTES,), (b"j" * KEY_NBYTES,))
KEYRING = Keyring(3, b"cluster", b"current", b"added", b"former")
EXAMPLES = [
    messages.Attach(),
    messages.GetView(),
    messages.GetStats(),
    messages.OpenNamespace(b"{}"),
    messages.Lend(4096, 3, 7, b"keys", b"parent", 12.5),
    messages.Commit((RUN, RUN)),
    messages.GiveBack(b"rows"),
    messages.Write(b"keys", 4096, False, b"parent", 9, 60.0, -3, False, True, b"head", True),
    messages.Placed(b"bits", True),
    messages.Checksums(b"sums"),
    messages.Drain(1e9),
    messages.Read(b"keys", True),
    messages.Pin(b"keys"),
    messages.Unpin(b"rows"),
    messages.Promote(b"keys", 1.5),
    messages.Delete(b"keys"),
    messages.Suspect(b"keys"),
    messages.Hint(b"keys", 60.0, -3, True, True, 512, (60.0, 100)),
    messages.Locate(b"keys"),
    messages.Announce("a", b"added", b"removed", b"lengths", b"bits", 1 << 60),
    messages.Why(b"keys"),
    messages.Configure(b"{}", b'{"ttl_s": 1}', b"{}"),
    messages.Adopt(b"{}"),
    messages.Report({"evicted": 3}, (0, 1), (2,)),
    messages.RecordTrace([TracedRequest(12.5, 16, b"keys")]),
    messages.FetchTrace(True),
    messages.AddToTrail([TrailEntry("request", 1.5, "text", bytes(16))]),
    messages.GetTrail("request"),
    messages.Heartbeat(VIEW.members[0], 3, VIEW, 5, b"{}", 2, KEYRING, HEAT),
    messages.Leave("a"),
    messages.Done(),
    messages.Count(3),
    messages.Attached("a", "h", "/t", "/a", b"secret", True, {"ca": "/c"}, b"cluster"),
    messages.ViewIs(VIEW),
    messages.Lent(b"r", b"o"),
    messages.Committed((messages.CommittedRun(b"u", b"r", b"o", "why not"),)),
    messages.Accepted(b"p", 2, b"o", b"k"),
    messages.Held(b"r", b"o", b"n", b"c"),
    messages.Reading(b"n", b"c", (("a",), ("b", "a")), b"places"),
    messages.Find(b"keys", True, True),
    messages.Found(b"r", b"o", b"n", b"c", b"g", b"k", (("a",), ("b", "a")), b"places"),
    messages.ConnectRdma((QueuePairEnd("::ffff:10.0.0.1", 3, 17, 99, 5),)),
    messages.ConnectNixl(3),
    messages.NixlConnected(b"nixlSerDes", 4, 1 << 47, 4096),
    messages.RdmaConnected((QueuePairEnd("fe80::1", 0, 18, 100, 3),), 1 << 47, 4096, b"keys"),
    messages.Located((("a", "b"), ("b",)), b"places", b"lengths", b"bits"),
    messages.Histories(b"p", b"n", b"r", b"t", b"a", b"o", b"k", ("lru",), 1.5),
    messages.Configured(b"{}"),
    messages.Trail([TrailEntry("request", 1.5, "text", bytes(16))]),
    messages.Trace([TracedRequest(12.5, 16, b"keys")]),
    messages.HeartbeatAnswer(VIEW, True, b"{}", True, KEYRING, True, ORDERS),
    messages.Unavailable("away"),
    messages.Stats(b"{}"),
    messages.Failure("UsageError", "no"),
]
for example in EXAMPLES:
    example.group = b"digest"
