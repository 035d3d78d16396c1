"""What the directory remembers of 1 024 nodes is bounded, and it learns them quickly. Its CPU time: `benchmarks`."""

import pytest

from benchmarks.directory import cold_start, state_nbytes
from raykv.membership.membership import Membership
from raykv.protocol.heat import MAX_REPORTED, HeatReport, HotPrefix
from raykv.protocol.messages import Heartbeat
from raykv.protocol.placement import Member

NODES = 1024
PREFIX_NBYTES = 256
"""Most bytes of state for one reported prefix."""


@pytest.mark.slow
def test_the_state_of_a_node_is_below_1_kib_and_its_heat_is_bounded():
    plain, hot = (state_nbytes(NODES, heat=heat, seed=1) for heat in (False, True))
    assert 0 < plain < 1024
    assert plain + 1024 < hot < plain + PREFIX_NBYTES * MAX_REPORTED


def test_a_report_that_is_too_long_is_cut():
    directory = Membership(member_timeout_s=5.0)
    prefixes = tuple(HotPrefix(number.to_bytes(16, "little"), 1.0, 1) for number in range(10 * MAX_REPORTED))
    directory.beat(Heartbeat(Member("n", "h", {}, 1.0, 1), 0, heat=HeatReport(1.0, prefixes)), now_s=0.0)
    ((_, report),) = directory.heat._reports.values()
    assert len(report.prefixes) == MAX_REPORTED


@pytest.mark.parametrize("seed", [1, 2])
def test_a_directory_that_starts_empty_has_the_whole_view_within_three_seconds(seed: int):
    assert cold_start(NODES, seed=seed) < 3.0
