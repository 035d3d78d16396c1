"""Only the memory of nodes that do not come back is removed."""

import os
import time
from pathlib import Path

import pytest

from raykv.config import NodeConfig, StorageConfig
from raykv.storage.files import ABANDONED_S, remove_orphans, store_files
from raykv.storage.store import Store


def config(directory: Path, node_id: str, cluster: str = "c") -> NodeConfig:
    storage = StorageConfig(arena_nbytes="1 MiB", extent_nbytes="1 MiB", shm_dir=directory)
    return NodeConfig(cluster=cluster, node_id=node_id, storage=storage)


def leave(directory: Path, node_id: str, *, age_s: float, cluster: str = "c") -> Store:
    """Create the memory of a node that last used it `age_s` seconds ago."""
    made = config(directory, node_id, cluster)
    store = Store.open(made.storage, made.file_prefix, now_s=0.0)
    os.utime(store.table.memory.path, (time.time() - age_s,) * 2)
    return store


@pytest.fixture
def here(tmp_path: Path) -> NodeConfig:
    return config(tmp_path, "me")


def test_old_memory_of_nodes_that_are_gone_is_removed(here, tmp_path):
    store = leave(tmp_path, "gone", age_s=2 * ABANDONED_S)
    files = store_files(config(tmp_path, "gone").file_prefix)
    store.close()
    assert remove_orphans(here, {"me"}, now_s=time.time()) == ["gone"]
    assert not any(path.exists() for path in files)


def test_memory_that_another_process_owns_stays(here, tmp_path):
    """The other process may belong to a raykv cluster of the same name in another Ray cluster."""
    store = leave(tmp_path, "stranger", age_s=2 * ABANDONED_S)
    assert remove_orphans(here, {"me"}, now_s=time.time()) == []
    store.close()


def test_memory_that_was_used_lately_stays(here, tmp_path):
    """A node that was killed a moment ago may be about to restart."""
    leave(tmp_path, "killed", age_s=5.0).close()
    assert remove_orphans(here, {"me"}, now_s=time.time()) == []


def test_memory_of_living_nodes_and_of_other_clusters_stays(here, tmp_path):
    leave(tmp_path, "alive", age_s=2 * ABANDONED_S).close()
    leave(tmp_path, "gone", age_s=2 * ABANDONED_S, cluster="other").close()
    assert remove_orphans(here, {"me", "alive"}, now_s=time.time()) == []


def test_memory_of_a_cluster_whose_name_begins_as_ours_stays(here, tmp_path):
    leave(tmp_path, "gone", age_s=2 * ABANDONED_S, cluster="c-two").close()
    assert remove_orphans(here, {"me"}, now_s=time.time()) == []
