"""One-sided reads over NVIDIA NIXL. Only the other modules of this package need it; import them late."""

import importlib.util


def missing() -> str:
    """Return why this process cannot use NIXL; empty if it can try."""
    return "" if importlib.util.find_spec("nixl") else "nixl is not installed: pip install 'raykv[nixl]'"
