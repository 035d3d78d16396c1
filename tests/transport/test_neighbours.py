"""Whether a peer's port answers, by the kernel's table of neighbours."""

import pytest

from raykv.transport.rdma import neighbours
from raykv.transport.rdma.neighbours import IPV4, answers, ipv4_of

HERE = IPV4 + "7f00:0001"


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "ARP", tmp_path / "arp")
    monkeypatch.setattr(neighbours, "PATIENCE_S", 0.02)
    return tmp_path / "arp"


def test_the_address_of_a_gid():
    assert ipv4_of(IPV4 + "0a4e:0102") == "10.78.1.2"


@pytest.mark.parametrize(
    ("flags", "interface", "answered"),
    [("0x0", "lo", False), ("0x2", "lo", True), ("0x6", "lo", True), ("0x0", "eth0", True)],
)
def test_a_neighbour_that_was_asked(table, flags, interface, answered):
    """What the kernel has asked over another interface does not count."""
    table.write_text(f"IP address HW type Flags HW address Mask Device\n127.0.0.2 0x1 {flags} 0:0 * {interface}\n")
    assert answers(HERE, IPV4 + "7f00:0002", "lo") is answered


def test_what_cannot_be_known_is_tried(table):
    assert answers(HERE, IPV4 + "7f00:0003", "lo")  # there is no table
    table.write_text("IP address\n")
    assert answers(HERE, IPV4 + "7f00:0003", "lo")  # behind a router
    assert answers("fe80::1", "fe80::2", "lo")
    assert answers(IPV4 + "0102:0304", IPV4 + "7f00:0002", "")


def test_no_route(table):
    assert not answers(IPV4 + "0102:0304", IPV4 + "7f00:0002", "lo")  # no address of this host
    assert not answers(HERE, IPV4 + "7f00:0002", "no-such0")
