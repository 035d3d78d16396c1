"""How long the soak tests run: RAYKV_SOAK="seed=7 kills=200 seconds=600", as `make soak SOAK=...` sets it."""

import os


def soak(name: str, default: int) -> int:
    """Return the number `name` in RAYKV_SOAK, or `default`. It is printed, so that a failure can be repeated."""
    given = dict(part.split("=", 1) for part in os.environ.get("RAYKV_SOAK", "").split())
    value = int(given.get(name, default))
    print(f"soak: {name}={value}")
    return value
