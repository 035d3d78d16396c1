"""Identifies weights by a digest of parts of their content. A digest of all bytes would take minutes.

Times and paths of files cannot identify weights, because they differ between hosts. Training changes nearly all bytes
of a tensor. So we read only windows of 4 KiB at equal distances in a large file. In a large safetensors file we also
read the header and the first 4 KiB of every tensor. Small files are read whole.
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
"""Files up to this size, such as configurations and small adapters, are read whole."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_NAMES = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")


def content_digest(path: Path) -> str:
    """Digest the weights in a directory or in one file.

    Args:
        path: Directory of a model or an adapter, or one file such as a GGUF.

    Returns:
        32 hexadecimal digits, equal for all copies of the same files.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"raykv-weights")
    for file in _files(path):
        nbytes = file.stat().st_size
        name = "" if file == path else file.name
        digest.update(f"\0{name}\0{nbytes}\0".encode())
        with file.open("rb") as opened:
            for offset, length in _windows(opened.fileno(), file.suffix, nbytes):
                digest.update(os.pread(opened.fileno(), length, offset))
    return digest.hexdigest()


def signature(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of each file. The result changes when a file on this host changes."""
    return tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in _files(path))


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return [file for file in found if file == path or file.suffix in _WEIGHT_SUFFIXES or file.name in _CONFIG_NAMES]


def _windows(descriptor: int, suffix: str, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file to read, as (offset, length)."""
    if nbytes <= SMALL_NBYTES:
        yield 0, nbytes
        return
    if suffix == ".safetensors":
        yield from _tensor_windows(descriptor)
    for window in range(WINDOWS_PER_FILE):
        yield window * (nbytes - WINDOW_NBYTES) // (WINDOWS_PER_FILE - 1), WINDOW_NBYTES


def _tensor_windows(descriptor: int) -> list[tuple[int, int]]:
    """Return (offset, length) of the header and of the start of each tensor; empty if the header is not valid."""
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
