"""Two hosts with two cables between them: reads use both, in proportion to their rates, and survive one."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.children import Child
from tests.chaos.hosts import Network, missing
from tests.support.nodes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

SECRET = "5e" * 32
COUNT, NBYTES = 16, 1 << 20
PAUSE_S = 0.5


class Cables:
    """A holder and a reader on hosts of their own, joined by the bridge and by two cables.

    Attributes:
        network: The hosts "a", of the holder, and "b", of the reader.
        reader: The reader's process.
    """

    def __init__(self, stack: ExitStack, megabits: tuple[int, int], **client: Any) -> None:
        self.network = Network(["a", "b"])
        stack.callback(self.network.close)
        for number, rate in enumerate(megabits):
            self.network.join("a", "b", number)
            self.network.set_rate("a", rate, nic=f"nic{number}")
        home = Path(tempfile.mkdtemp(prefix="raykv-nics-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        storage = {"arena_nbytes": "64 MiB", "extent_nbytes": "4 MiB", "shm_dir": str(home)}
        config = {"node_id": "holder", "host": "a", "bind": f"{self.network.addresses['a']}:0", "nics": "nic0,nic1"}
        common = {"secret": SECRET, "count": COUNT, "nbytes": NBYTES}
        self.holder = self._child(stack, "a", name="holder", config={**config, "storage": storage}, **common)
        fields = {"address": self.holder.ask("address"), "timeout_s": 20.0, **client}
        self.reader = self._child(stack, "b", name="reader", config=fields, pause_s=PAUSE_S, **common)

    def _child(self, stack: ExitStack, host: str, **fields: Any) -> Child:
        child = Child(self.network.command(host), "tests.chaos.reading", **fields)
        stack.callback(child.close)
        assert child.receive() == "ready"
        return child

    def received(self) -> list[int]:
        """Return the bytes that each cable, and last the bridge, has brought to the reader."""
        return [self.network.received_nbytes("b", nic) for nic in ("nic0", "nic1", "eth")]

    def read(self, times: int) -> list[int]:
        """Read all chunks. Returns the bytes over each cable, and over the bridge."""
        before = self.received()
        found = self.reader.ask("read", times=times)
        assert (found["missing"], found["wrong"]) == (0, 0)
        return [after - earlier for earlier, after in zip(before, self.received(), strict=True)]

    def in_use(self) -> list[bool]:
        """Read all chunks, and return which cables were in use at the end."""
        return [rail["in_use"] for rail in self.reader.ask("read", times=1)["rails"]]


@pytest.fixture
def cables() -> Iterator[Callable[..., Cables]]:
    with ExitStack() as stack:
        yield lambda *megabits, **client: Cables(stack, megabits, **client)


def test_reads_use_both_cables_evenly(cables):
    both = cables(150, 150)
    both.read(2)
    first, second, bridge = both.read(3)
    assert first + second > 3 * COUNT * NBYTES
    assert 0.8 < first / second < 1.25
    assert bridge < 1 << 20


def test_reads_use_unequal_cables_in_proportion(cables):
    both = cables(200, 100)
    both.read(3)
    first, second, _ = both.read(4)
    assert 1.5 < first / second < 2.7


def test_a_reader_may_name_its_nics(cables):
    both = cables(400, 400, nics="nic0,10.78.1.2")
    first, second, _ = both.read(2)
    assert min(first, second) > COUNT * NBYTES // 2


def test_a_reader_may_stay_on_the_main_address(cables):
    both = cables(400, 400, nics="off")
    first, second, bridge = both.read(2)
    assert max(first, second) < 1 << 16
    assert bridge > 2 * COUNT * NBYTES


@pytest.mark.parametrize(("host", "nic"), [("a", "nic1"), ("b", "nic0")])
def test_a_cable_that_goes_down_in_the_middle_costs_no_read(cables, host, nic):
    both = cables(150, 150)
    both.read(1)
    network, before = both.network, both.network.received_nbytes("b", nic)
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(both.reader.ask("read", times=4)))
    thread.start()
    wait_until(lambda: network.received_nbytes("b", nic) > before + 4 * NBYTES)
    network.set_up(host, nic, up=False)
    thread.join()
    assert (found["missing"], found["wrong"]) == (0, 0)
    assert [rail["in_use"] for rail in found["rails"]] == [nic != "nic0", nic != "nic1"]
    network.set_up(host, nic, up=True)
    wait_until(lambda: both.in_use() == [True, True])
    first, second, _ = both.read(2)
    assert min(first, second) > COUNT * NBYTES // 4
