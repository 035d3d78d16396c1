"""What the directory remembers of 1 024 nodes is bounded, and it learns them quickly. Its CPU time: `benchmarks`."""

import pytest

from benchmarks.directory import cold_start, state_nbytes
from raykv.protocol.heat import MAX_REPORTED

NODES = 1024
PREFIX_NBYTES = 256
"""Most bytes of state for one reported prefix."""


@pytest.mark.slow
def test_the_state_of_a_node_is_below_1_kib_and_its_heat_is_bounded():
    plain, hot = (state_nbytes(NODES, heat=heat, seed=1) for heat in (False, True))
    assert 0 < plain < 1024
    assert plain + 1024 < hot < plain + PREFIX_NBYTES * MAX_REPORTED


@pytest.mark.parametrize("seed", [1, 2])
def test_a_directory_that_starts_empty_has_the_whole_view_within_three_seconds(seed: int):
    assert cold_start(NODES, seed=seed) < 3.0
