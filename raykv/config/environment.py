"""Reads environment variables. No other module does."""

import os
import sys


def client_fields() -> dict[str, str]:
    """Return the fields of ClientConfig that RAYKV_ADDRESS and RAYKV_SECRET set. An empty variable counts as unset."""
    variables = {"address": "RAYKV_ADDRESS", "secret": "RAYKV_SECRET"}
    return {field: os.environ[variable] for field, variable in variables.items() if os.environ.get(variable)}


def environment_of_child() -> dict[str, str]:
    """Return the environment variables for a child process that runs Python.

    The child finds the same modules as this process. The BLAS library starts no threads in the child, so that the child
    can fork.
    """
    found = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def native_wanted() -> bool:
    """Return whether the C extension may be used. RAYKV_NATIVE=0 forbids it."""
    return os.environ.get("RAYKV_NATIVE", "1") != "0"
