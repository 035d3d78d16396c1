"""Requests and bytes by quota group."""

from raykv.node import group_traffic
from raykv.node.group_traffic import GroupTraffic


def test_groups_are_counted_if_the_node_knows_them(monkeypatch):
    monkeypatch.setattr(group_traffic, "MAX_GROUPS", 3)
    known = {b"a", b"b", b"c"}
    traffic = GroupTraffic(lambda digest: digest in known)
    for group in (b"a", b"a", b"b", b"c", b"stranger"):
        traffic.add(group, 10)
    assert traffic.stats(b"a") == {"requests": 2, "served_nbytes": 20}
    assert traffic.stats(b"stranger") == {"requests": 0, "served_nbytes": 0}
    known -= {b"a", b"b"}
    known.add(b"d")
    traffic.add(b"d", 1)
    assert traffic.stats(b"d") == {"requests": 1, "served_nbytes": 1}
    assert traffic.stats(b"c")["requests"] == 1
    assert traffic.stats(b"a")["requests"] == 0, "the node no longer knows it, and its room was needed"
