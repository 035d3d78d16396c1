"""Memory on this host that nobody will come back for."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import Final

from raykv.config import NodeConfig
from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory
from raykv.storage.store import remove_files

log = logging.getLogger(__name__)

ABANDONED_S: Final = 300.0
"""A node that lives touches its table with every beat; one that was killed is restarted long before this."""


def sweep(config: NodeConfig, alive: Container[str], *, now_s: float) -> list[str]:
    """Remove what nodes of this cluster's name left here whose Ray nodes are gone.

    A new Ray node has a new name, so nobody would ever use it again, and it fills the memory. But another Ray cluster
    on this host may have a raykv cluster of the same name: what anybody owns or has used lately is left alone.

    Args:
        config: Of the node that starts here.
        alive: Names of the nodes whose Ray nodes are alive.
        now_s: Wall clock, as of file times.

    Returns:
        Names of the nodes whose memory is gone.
    """
    directory = config.storage.shm_dir
    start = f"raykv-{config.cluster}-"
    gone = []
    for table in sorted(directory.glob(f"{start}*.table")) if directory else []:
        node_id = table.name.removeprefix(start).removesuffix(".table")
        if "-" in node_id:
            continue  # a Ray node's name has none: this is of a cluster whose name begins as ours does
        if node_id in alive or not _abandoned(table, now_s):
            continue
        log.info("removing the memory of node %s, which is gone", node_id)
        forget(table.with_suffix(""))
        gone.append(node_id)
    return gone


def forget(prefix: Path) -> None:
    """Remove all files of a node in shared memory; see `NodeConfig.file_prefix`."""
    remove_files(prefix)
    for suffix in (".sock", ".namespaces", ".namespaces.new"):
        prefix.with_name(prefix.name + suffix).unlink(missing_ok=True)


def forget_unowned(prefix: Path) -> bool:
    """The same, but not under a process that serves them. Whether nobody did."""
    table = prefix.with_name(prefix.name + ".table")
    if table.exists() and not _unowned(table):
        return False
    forget(prefix)
    return True


def _abandoned(table: Path, now_s: float) -> bool:
    try:
        return now_s - table.stat().st_mtime >= ABANDONED_S and _unowned(table)
    except OSError:
        return False  # somebody else has just removed it


def _unowned(table: Path) -> bool:
    try:
        memory = SharedMemory.attach(table, writable=True)
    except (OSError, LostError):
        return False  # somebody else has just removed it, or it is not ours
    try:
        memory.own(timeout_s=0.0)
    except ConfigError:
        return False
    finally:
        memory.close()
    return True
