"""Adds to the wall clock what the file RAYKV_TEST_CLOCK says. Python imports this module at its start.

Only the wall clock jumps: a machine's monotonic clock cannot be set.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("RAYKV_TEST_CLOCK")
if _path:
    with open(_path, "rb") as _file:
        _shift = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _time_ns = time.time_ns

    def time_ns() -> int:
        return int(_time_ns() + 1e9 * struct.unpack("d", _shift[:8])[0])

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
