"""Opens, makes and removes the files of nodes: the chunk table, the arena, and small files with the same prefix."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import Final

from raykv.config import NodeConfig, StorageConfig
from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory, require_pages, require_room
from raykv.memory.layout import table_nbytes
from raykv.memory.table import Table

log = logging.getLogger(__name__)

OWN_TIMEOUT_S: Final = 10.0
"""How long a starting node waits for the end of the process that owns the node's files."""
MOST_TICKS: Final = 1 << 31
"""A table of this age in ticks (about a year) is replaced by an empty table: its 32-bit times would soon wrap."""
ABANDONED_S: Final = 300.0
"""Files count as abandoned when they were not touched for this time. A node touches its table at every heartbeat."""


def store_files(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".table"), prefix.with_name(prefix.name + ".arena")


def remove_files(prefix: Path) -> None:
    """Remove a node's chunk table and arena. A process that has mapped these files can still use them.

    Raises:
        ConfigError: A file cannot be removed, for example because it belongs to another user.
    """
    for path in store_files(prefix):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"field 'shm_dir': {path} is not this node's and cannot be removed ({error.strerror}): remove it, or "
                "choose another shm_dir or node_id"
            ) from error


def attach_files(config: StorageConfig, prefix: Path, *, now_s: float) -> tuple[Table, SharedMemory]:
    """Map a node's files as their only writer. Raises LostError if a file is missing, damaged or not for `config`."""
    table_path, arena_path = store_files(prefix)
    memory = SharedMemory.attach(table_path, writable=True, huge_pages="try")
    memory.own(timeout_s=OWN_TIMEOUT_S)
    table = Table(memory)
    arena = SharedMemory.attach(arena_path, writable=True, huge_pages=config.huge_pages)
    made_for = (table.rows, table.extents, table.extent_nbytes, arena.nbytes)
    if made_for != (config.rows, config.extents, config.extent_nbytes, config.extents * config.extent_nbytes):
        raise LostError(f"{table_path} was made for another configuration")
    if table.ticks(now_s) >= MOST_TICKS:
        raise LostError(f"{table_path} is too old for its 32-bit times")
    require_pages(arena, config.extent_nbytes)
    return table, arena


def create_files(config: StorageConfig, prefix: Path | None, *, now_s: float) -> tuple[Table, SharedMemory]:
    """Make an empty table and an empty arena. If `prefix` is None, use anonymous memory.

    Raises:
        ConfigError: There is no room, or the kernel lacks the required huge pages.
    """
    arena_nbytes = config.extents * config.extent_nbytes
    table_path, arena_path = (None, None) if prefix is None else store_files(prefix)
    require_room(config.shm_dir, arena_nbytes + table_nbytes(config.rows, config.extents), field="arena_nbytes")
    arena = SharedMemory.create(arena_path, arena_nbytes, huge_pages=config.huge_pages)
    try:
        require_pages(arena, config.extent_nbytes)
        table = Table.create(
            table_path, rows=config.rows, extents=config.extents, extent_nbytes=config.extent_nbytes, now_s=now_s
        )
    except ConfigError:
        if prefix is not None:
            remove_files(prefix)
        raise
    table.memory.own(timeout_s=OWN_TIMEOUT_S)
    return table, arena


def remove_orphans(config: NodeConfig, alive: Container[str], *, now_s: float) -> list[str]:
    """Remove the files that raykv nodes of ended Ray nodes left on this host. Return the ids of these raykv nodes.

    A new Ray node has a new id, so no node would use these files again. Files stay if a process owns them or has used
    them recently: they may belong to a raykv cluster of the same name on another Ray cluster of this host.

    Args:
        config: Settings of any node of this cluster.
        alive: Ids of the raykv nodes on live Ray nodes.
        now_s: Time of the wall clock, as in file times.
    """
    directory = config.storage.shm_dir
    start = f"raykv-{config.cluster}-"
    removed = []
    for table in sorted(directory.glob(f"{start}*.table")) if directory else []:
        node_id = table.name.removeprefix(start).removesuffix(".table")
        if "-" in node_id:
            continue  # a Ray node's id has no dash, so the file belongs to another cluster with a longer name
        if node_id not in alive and _is_abandoned(table, now_s):
            log.info("removing the memory of node %s, which is gone", node_id)
            remove_all_files(table.with_suffix(""))
            removed.append(node_id)
    return removed


def remove_all_files(prefix: Path) -> None:
    """Remove all files that a node has in shared memory; see `NodeConfig.file_prefix`."""
    remove_files(prefix)
    for suffix in (".sock", *(name + end for name in (".namespaces", ".view", ".keyring") for end in ("", ".new"))):
        prefix.with_name(prefix.name + suffix).unlink(missing_ok=True)


def remove_unowned(prefix: Path) -> bool:
    """Remove all files of a node, unless a process owns them. Returns whether the files were removed."""
    table = prefix.with_name(prefix.name + ".table")
    if table.exists() and not _is_unowned(table):
        return False
    remove_all_files(prefix)
    return True


def _is_abandoned(table: Path, now_s: float) -> bool:
    try:
        return now_s - table.stat().st_mtime >= ABANDONED_S and _is_unowned(table)
    except OSError:
        return False  # another process has just removed the file


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
