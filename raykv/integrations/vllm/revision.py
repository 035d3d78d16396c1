"""Which weights are these? A digest of their content that costs milliseconds.

File times and paths differ between hosts that hold the same model, so they cannot say; reading all bytes takes minutes.
Training changes a tensor nearly everywhere, so we read the first kibibytes of every tensor, which the header of a
safetensors file locates, plus the header itself; of other files, windows spread evenly.
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
"""Files up to this size are read whole: every configuration file is, and so are small adapters."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_NAMES = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")


def content_digest(path: Path) -> str:
    """Digest the weights in a directory, or in one file, by content only.

    Args:
        path: A model's or an adapter's directory as the hub lays it out, or one file such as a GGUF.

    Returns:
        32 hexadecimal digits; equal for copies of the same files, wherever they lie.

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
    """Tell, without reading them, whether files have changed on this host: name, size and time of each."""
    files = [path] if path.is_file() else [one for one in path.iterdir() if _matters(one)]
    return tuple(sorted((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files))


def _matters(file: Path) -> bool:
    return file.is_file() and (file.suffix in _WEIGHT_SUFFIXES or file.name in _CONFIG_NAMES)


def _windows(descriptor: int, suffix: str, nbytes: int) -> Iterator[tuple[int, int]]:
    """Which parts of a file to read, as (offset, length)."""
    if nbytes <= SMALL_NBYTES:
        yield 0, nbytes
        return
    if suffix == ".safetensors":
        yield from _tensor_windows(descriptor)
    for window in range(WINDOWS_PER_FILE):
        yield window * (nbytes - WINDOW_NBYTES) // (WINDOWS_PER_FILE - 1), WINDOW_NBYTES


def _tensor_windows(descriptor: int) -> list[tuple[int, int]]:
    """The header of a safetensors file and the beginning of each tensor; nothing if it is not one after all."""
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
