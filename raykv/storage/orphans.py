"""Memory on this host that no node will come back for."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import Final

from raykv.config import NodeConfig
from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory
from raykv.storage.files import remove_files

log = logging.getLogger(__name__)

ABANDONED_S: Final = 300.0
"""Memory is abandoned this long after its last use. A node touches its table with every heartbeat."""


def remove_orphans(config: NodeConfig, alive: Container[str], *, now_s: float) -> list[str]:
    """Remove memory that nodes of this cluster's name left here and whose Ray nodes are gone.

    A new Ray node has a new name, so that memory would never be used again. Another Ray cluster on this host may have a
    raykv cluster of the same name: memory that a process owns or used lately stays. `alive`: names of the nodes whose
    Ray nodes are alive. `now_s`: wall clock, as of file times. Returns: names of the nodes whose memory was removed.
    """
    directory = config.storage.shm_dir
    start = f"raykv-{config.cluster}-"
    removed = []
    for table in sorted(directory.glob(f"{start}*.table")) if directory else []:
        node_id = table.name.removeprefix(start).removesuffix(".table")
        if "-" in node_id:
            continue  # of a cluster whose name begins as ours does: a Ray node's name has no dash
        if node_id not in alive and _is_abandoned(table, now_s):
            log.info("removing the memory of node %s, which is gone", node_id)
            remove_all_files(table.with_suffix(""))
            removed.append(node_id)
    return removed


def remove_all_files(prefix: Path) -> None:
    """Remove all files of a node in shared memory; see `NodeConfig.file_prefix`."""
    remove_files(prefix)
    for suffix in (".sock", ".namespaces", ".namespaces.new"):
        prefix.with_name(prefix.name + suffix).unlink(missing_ok=True)


def remove_unowned(prefix: Path) -> bool:
    """Remove all files of a node, unless a process serves them. Whether they were removed."""
    table = prefix.with_name(prefix.name + ".table")
    if table.exists() and not _is_unowned(table):
        return False
    remove_all_files(prefix)
    return True


def _is_abandoned(table: Path, now_s: float) -> bool:
    try:
        return now_s - table.stat().st_mtime >= ABANDONED_S and _is_unowned(table)
    except OSError:
        return False  # another process has just removed it


def _is_unowned(table: Path) -> bool:
    try:
        memory = SharedMemory.attach(table, writable=True)
    except (OSError, LostError):
        return False  # another process has just removed it, or it belongs to another user
    try:
        memory.own(timeout_s=0.0)
    except ConfigError:
        return False
    finally:
        memory.close()
    return True
