"""Identifies weights by a digest of their content that takes milliseconds.

Times and paths of equal files differ between hosts, and to read all bytes takes minutes. Training changes nearly all of
a tensor, so we read the header of a safetensors file and the first kibibytes of every tensor. Of other files we read
windows at equal distances.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

WINDOW_NBYTES = 4096
WINDOWS_PER_FILE = 256
MAX_HEADER_NBYTES = 100 << 20
SMALL_NBYTES = 1 << 20
"""Files up to this size are read whole: all configuration files, and small adapters."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_NAMES = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")


def content_digest(path: Path) -> str:
    """Digest the weights in a directory, or in one file, by content only.

    Args:
        path: Directory of a model or an adapter, as on the hub, or one file such as a GGUF.

    Returns:
        32 hexadecimal digits, equal for all copies of the same files.

    Raises:
        OSError: A file cannot be read.
    """
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if _matters(one))
    digest = hashlib.blake2b(digest_size=16, person=b"raykv-weights")
    for file in files:
        nbytes = file.stat().st_size
        name = "" if file == path else file.name
        digest.update(f"\0{name}\0{nbytes}\0".encode())
        with file.open("rb") as opened:
            for offset, length in _windows(opened.fileno(), file.suffix, nbytes):
                digest.update(os.pread(opened.fileno(), length, offset))
    return digest.hexdigest()


def signature(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file: these differ when files have changed on this host."""
    files = [path] if path.is_file() else [one for one in path.iterdir() if _matters(one)]
    return tuple(sorted((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files))


def _matters(file: Path) -> bool:
    return file.is_file() and (file.suffix in _WEIGHT_SUFFIXES or file.name in _CONFIG_NAMES)


def _windows(descriptor: int, suffix: str, nbytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a file to read, as (offset, length)."""
    if nbytes <= SMALL_NBYTES:
        yield 0, nbytes
        return
    if suffix == ".safetensors":
        yield from _tensor_windows(descriptor)
    for window in range(WINDOWS_PER_FILE):
        yield window * (nbytes - WINDOW_NBYTES) // (WINDOWS_PER_FILE - 1), WINDOW_NBYTES


def _tensor_windows(descriptor: int) -> list[tuple[int, int]]:
    """The header of a safetensors file and the start of each tensor; empty if the header is not valid."""
    header_nbytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        return []
    try:
        header = json.loads(os.pread(descriptor, header_nbytes, 8))
        spans = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
        data = 8 + header_nbytes
        return [(0, data), *((data + start, min(stop - start, WINDOW_NBYTES)) for start, stop in spans)]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
