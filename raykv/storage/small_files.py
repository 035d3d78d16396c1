"""Small files that outlive their process: they are replaced atomically, and read with suspicion."""

import os
import stat
from pathlib import Path


def read_file(path: Path, *, most_nbytes: int) -> bytes | None:
    """Return the content of a file that `replace_file` made, at most `most_nbytes` bytes. None: there is no such file.

    Raises:
        OSError: The file cannot be read. Or another user could have made or changed it: it is no regular file (for
            example, a link or a pipe), belongs to another user, or others may write to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"mode {stat.filemode(found.st_mode)}, user {found.st_uid}: others could have written it")
        return file.read(most_nbytes)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file for this user alone. A reader finds either the whole old content or the whole new content.

    Raises:
        OSError: The file cannot be written. The old file stays.
    """
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
