"""A read under a deadline returns the leading chunks, and a holder that hangs costs only its own chunks."""

import threading
import time

import pytest

from raykv.client import fetcher
from raykv.protocol import messages
from raykv.transport import bulk_read
from tests.support.nodes import NBYTES, SPACE, cluster, content, get, names, put

CHUNKS = 64


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("matched", [True, False], ids=["with match", "by the owners"])
def test_a_deadline_in_the_middle_leaves_a_prefix(monkeypatch, faults, streams, matched):
    """Each message takes 20 ms, and each chunk needs a request of its own."""
    monkeypatch.setattr(bulk_read, "PART_NBYTES", 1)
    monkeypatch.setattr(fetcher, "STREAM_NBYTES", NBYTES)
    with cluster(2, arena_nbytes="16 MiB") as running:
        keys = names(CHUNKS)
        put(running.client(SPACE, node=1), keys)
        running.settle()
        client = running.client(SPACE, node=0, streams_per_peer=streams)
        match = client.match(keys)
        assert match.count == CHUNKS
        assert all(get(client, keys, match=match if matched else None))
        faults.delay_s = 0.02
        into = [bytearray(NBYTES) for _ in keys]
        result = client.get(keys, into, match=match if matched else None, timeout_s=0.02 * CHUNKS / streams)
        faults.delay_s = 0.0
        # An owner on this host is asked by other messages, so look only at the keys of the other owner.
        remote = running.nodes[0].view.ring.shares(client._as_keys(keys))["node-1"]
        hits = [result.hits[place] for place in (range(CHUNKS) if matched else remote)]
        assert 0 < sum(hits) < len(hits)
        prefix = hits.index(False)
        assert prefix >= sum(hits) // 2, "four connections with a quarter each would leave a quarter"
        assert all(into[place] == content(keys[place]) for place in range(CHUNKS) if result.hits[place])


def test_a_holder_that_hangs_costs_its_own_chunks_only(monkeypatch):
    with cluster(4) as running:
        keys, woken = names(30), threading.Event()
        for number in (1, 2, 3):
            put(running.client(SPACE, node=number), keys[number - 1 :: 3], chained=False)
        running.settle()
        client = running.client(SPACE, node=0)
        match = client.match(keys)
        assert match.count == len(keys)
        serve = running.nodes[2].handlers[messages.Read]

        def hang(request, session):
            woken.wait(30.0)
            return serve(request, session)

        monkeypatch.setitem(running.nodes[2].handlers, messages.Read, hang)
        began_s = time.monotonic()
        hits = get(client, keys, match=match, timeout_s=0.5)
        assert time.monotonic() - began_s < 5.0
        woken.set()
        assert [place for place, hit in enumerate(hits) if not hit] == list(range(1, 30, 3))
        assert list(client.stats()["tripped_peers"]) == [running.nodes[2].member.address]
        began_s = time.monotonic()
        assert get(client, keys, match=match, timeout_s=30.0)[0::3] == (True,) * 10
        assert time.monotonic() - began_s < 20.0, "the holder that hangs is asked again"
