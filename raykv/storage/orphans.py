"""Removing the shared-memory files of nodes that no longer exist."""

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
"""Files are abandoned this long after their last use. A node touches its table with every heartbeat."""


def remove_orphans(config: NodeConfig, alive: Container[str], *, now_s: float) -> list[str]:
    """Remove the files on this host of nodes of this cluster whose Ray nodes are gone.

    A new Ray node has a new id, so no node would use these files again. Another Ray cluster on this host may have a
    raykv cluster of the same name. So files stay that a process owns or used lately. `alive`: ids of the nodes whose
    Ray nodes are alive. `now_s`: wall clock, as in file times. Returns: ids of the nodes whose files were removed.
    """
    directory = config.storage.shm_dir
    start = f"raykv-{config.cluster}-"
    removed = []
    for table in sorted(directory.glob(f"{start}*.table")) if directory else []:
        node_id = table.name.removeprefix(start).removesuffix(".table")
        if "-" in node_id:
            continue  # a cluster whose name begins with ours and a dash; a Ray node's id has no dash
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
    """Remove all files of a node, unless a process serves them. Returns whether the files were removed."""
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
        return False  # another process has just removed the file, or the file belongs to another user
    try:
        memory.own(timeout_s=0.0)
    except ConfigError:
        return False
    finally:
        memory.close()
    return True
