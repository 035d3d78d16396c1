"""A node's copy of the cluster's secrets (`raykv.protocol.keyring`). The copy outlives the process in a file."""

import logging
from pathlib import Path
from typing import Final

import msgspec

from raykv.protocol.keyring import Keyring
from raykv.storage.small_files import read_file, replace_file

log = logging.getLogger(__name__)

MAX_FILE_NBYTES: Final = 4096


class KeyStore:
    """The secrets that a node knows. Only the heartbeat thread changes them.

    The process that starts the node knows only the secret that the cluster began with. The file has those of the node's
    last heartbeat.

    Attributes:
        keyring: The secrets. They are replaced, never changed.
    """

    def __init__(self, secret: bytes, path: Path | None) -> None:
        """Load the file, if it belongs to the cluster that began with `secret`. `path` None: there is no file."""
        self.keyring, self._path = Keyring.first(secret), path
        if path is None:
            return
        try:
            content = read_file(path, most_nbytes=MAX_FILE_NBYTES)
            if content is None:
                return
            found = msgspec.msgpack.decode(content, type=Keyring)
        except (OSError, ValueError) as error:
            log.warning("no secrets in %s; the directory sends its own: %s", path, error)
            return
        self._adopt(found)

    def adopt(self, keyring: Keyring) -> bool:
        """Take newer secrets of this cluster, and store them. Returns whether they are newer."""
        newer = self._adopt(keyring)
        if newer and self._path is not None:
            try:
                replace_file(self._path, msgspec.msgpack.encode(keyring))
            except OSError as error:
                log.warning("the secrets cannot be written to %s: %s", self._path, error)
        return newer

    def _adopt(self, keyring: Keyring) -> bool:
        newer = keyring.cluster == self.keyring.cluster and keyring.version > self.keyring.version
        if newer:
            self.keyring = keyring
        return newer


def keyring_path(prefix: Path | None) -> Path | None:
    """Return the file for a node's secrets: next to its memory files."""
    return None if prefix is None else prefix.with_name(prefix.name + ".keyring")
