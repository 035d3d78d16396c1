"""These tests need two RDMA devices in one network: `python -m tests.rdma.run` runs them in a virtual machine."""

import pytest

from raykv.transport import rdma


@pytest.fixture(autouse=True)
def no_thread_stays() -> None:
    """Allow threads after a test: the tests of a file share their nodes, because these start slowly."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = rdma.missing()
    for item in items:
        if "verbs" in item.keywords and reason:
            item.add_marker(pytest.mark.skip(reason=f"{reason}; run python -m tests.rdma.run"))
