"""Reads environment variables. No other module does."""

import os
import sys
from typing import Any


def client_fields() -> dict[str, Any]:
    """Return the fields of ClientConfig that environment variables set. An empty variable counts as unset.

    RAYKV_ADDRESS and RAYKV_SECRET set `address` and `secret`. RAYKV_TLS_CERTIFICATE, RAYKV_TLS_PRIVATE_KEY and
    RAYKV_TLS_CA set the fields of `tls`.
    """
    found: dict[str, Any] = _variables({"address": "RAYKV_ADDRESS", "secret": "RAYKV_SECRET"})
    names = ("certificate", "private_key", "ca")
    if tls := _variables({name: f"RAYKV_TLS_{name.upper()}" for name in names}):
        found["tls"] = tls
    return found


def _variables(fields: dict[str, str]) -> dict[str, str]:
    return {field: os.environ[variable] for field, variable in fields.items() if os.environ.get(variable)}


def environment_of_child(*, preload: str | None = None) -> dict[str, str]:
    """Return the environment variables for a child process that runs Python.

    The child finds the same modules as this process. The BLAS library starts no threads in the child, so that the child
    can fork. `preload`: a shared library that ld.so loads first, after those that LD_PRELOAD already names.
    """
    found = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if preload is not None:
        environment["LD_PRELOAD"] = " ".join(name for name in (environment.get("LD_PRELOAD"), preload) if name)
    return environment


def native_wanted() -> bool:
    """Return whether the C extension may be used. RAYKV_NATIVE=0 forbids it."""
    return os.environ.get("RAYKV_NATIVE", "1") != "0"
