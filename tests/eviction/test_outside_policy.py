"""A policy from outside the package, as in docs/policies.md: a module in a folder, named in the config."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.eviction import policy
from raykv.eviction.base import empty_columns
from raykv.eviction.group_policies import GroupPolicies
from raykv.memory.layout import RowState
from tests.support.stores import FULL, LETTERS, Bench

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
MODULE = re.search(r"```python file=my_policy.py\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules can be imported. At the end, these modules are unloaded."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]:
        if str(sys.modules[name].__file__).startswith(str(tmp_path)):
            del sys.modules[name]


def test_the_policy_of_the_page_decides_in_a_store(folder):
    assert MODULE is not None
    assert len(MODULE[1].strip().splitlines()) <= 10
    (folder / "my_policy.py").write_text(MODULE[1])
    bench = Bench.open(policy="my_policy:LeastBytesRead", **FULL)
    assert bench.store.evictor.policies.name(bench.group) == "least_bytes_read"
    assert bench.put(LETTERS, chained=False) == len(LETTERS)
    columns = bench.store.table.columns
    columns.frequency[columns.state == RowState.READY] = 1
    columns.frequency[bench.row("D")] = 0
    assert bench.put("z") == 1
    assert bench.here(LETTERS) == LETTERS.replace("D", "")
    bench.close()


def test_a_function_is_enough(folder):
    (folder / "newest.py").write_text(
        "def score(columns, rows, now):\n    return -columns.inserted[rows].astype(int)\n"
    )
    columns = empty_columns(3)
    columns.inserted[:] = [5, 9, 7]
    found = GroupPolicies(policy("newest:score"), columns).victims(np.arange(3, dtype=np.int32), 2, 0)
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("method", ["score", "on_insert", "on_remove", "on_request_done"])
def test_a_class_that_raises_is_replaced_and_reported_once(folder, method, caplog):
    (folder / "faulty.py").write_text(
        "from raykv.eviction.base import Policy\n"
        "class Faulty(Policy):\n"
        "    def score(self, columns, rows, now): return columns.inserted[rows]\n"
        f"    def {method}(self, *arguments, **fields): raise ValueError('mistake')\n"
    )
    columns, rows = empty_columns(4), np.arange(4, dtype=np.int32)
    columns.accessed[:] = [4, 2, 3, 1]
    policies = GroupPolicies(policy("faulty:Faulty"), columns)
    for _ in range(2):
        policies.on_insert(rows, 1)
        policies.on_request_done(rows, 7, 1)
        gone = policies.victims(rows, 2, 1)
        policies.on_remove(gone, 1, evicted=True)
    assert gone.tolist() == [3, 1]
    assert policies.default.name == "leaf_lru"
    assert [record.getMessage() for record in caplog.records] == [
        "eviction policy faulty:Faulty failed; leaf_lru takes its place"
    ]


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no_such_module"):
        Bench.open(policy="no_such_module:Policy")
