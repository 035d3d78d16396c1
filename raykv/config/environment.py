"""The only place that reads the environment."""

import os
import sys


def client_fields() -> dict[str, str]:
    """Fields of ClientConfig: RAYKV_ADDRESS and RAYKV_SECRET, if set and not empty."""
    variables = {"address": "RAYKV_ADDRESS", "secret": "RAYKV_SECRET"}
    return {field: os.environ[variable] for field, variable in variables.items() if os.environ.get(variable)}


def environment_of_child() -> dict[str, str]:
    """For a child process that finds the same modules and can fork: numpy's BLAS must start no threads in it."""
    found = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def native_wanted() -> bool:
    """Whether compiled loops may be used: yes, unless RAYKV_NATIVE is 0."""
    return os.environ.get("RAYKV_NATIVE", "1") != "0"
