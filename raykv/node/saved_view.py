"""A node's last view, in a file next to its memory, so that a restarted node knows the other nodes at once."""

import logging
from pathlib import Path
from typing import Final

import msgspec

from raykv.protocol.placement import View
from raykv.storage.small_files import read_file, replace_file

log = logging.getLogger(__name__)

MAX_FILE_NBYTES: Final = 16 << 20
MAX_EPOCH: Final = 1 << 32
"""Epochs are below this number, because the header of a message has 32 bits for them."""


class SavedView:
    """The file with a node's last view."""

    def __init__(self, prefix: Path | None) -> None:
        """`prefix`: see `NodeConfig.file_prefix`. None: the node has no files, and nothing is saved."""
        self._path = None if prefix is None else prefix.with_name(prefix.name + ".view")

    def load(self) -> View:
        """Return the saved view, or an empty view if there is none. Logs a warning about a file with other content."""
        if self._path is None:
            return View()
        try:
            text = read_file(self._path, most_nbytes=MAX_FILE_NBYTES)
            return View() if text is None else _decode(text)
        except (OSError, ValueError, RecursionError) as error:
            log.warning("no view in %s; the directory sends its own: %s", self._path, error)
            return View()

    def save(self, view: View) -> None:
        """Replace the file. Logs a warning if this fails: a restarted node then waits for the directory."""
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.encode(view))
        except OSError as error:
            log.warning("the view cannot be written to %s: %s", self._path, error)


def _decode(text: bytes) -> View:
    """Raises ValueError if `text` is not a view that a directory could have made."""
    view = msgspec.json.decode(text, type=View)
    if not 0 <= view.epoch < MAX_EPOCH:
        raise ValueError(f"epoch {view.epoch}")
    if len({member.node_id for member in view.members}) < len(view.members):
        raise ValueError("two members of one name")
    for member in view.members:
        if not (0 <= member.incarnation < 1 << 63 and 0.0 <= member.weight < float("inf")):
            raise ValueError(f"incarnation {member.incarnation} or weight {member.weight} of {member.node_id!r}")
    return view
