"""The compiled loops. Each is None if it was not built; then the callers use numpy and the standard library.

The package build compiles the loops if it finds a C compiler. RAYKV_NATIVE=0 turns them off.
"""

from typing import Final

from raykv.config import native_wanted

try:
    from raykv.memory.native import _native
except ImportError:
    _built = None
else:
    _built = _native

available: Final = _built is not None and native_wanted()
"""Whether the compiled loops are in use."""

_used = _built if available else None
find: Final = _used.find if _used else None
enter: Final = _used.enter if _used else None
read: Final = _used.read if _used else None
fill: Final = _used.fill if _used else None
share: Final = _used.share if _used else None
receive: Final = _used.receive if _used else None
quickest: Final = _used.quickest if _used else None
vectors: Final = _used.vectors if _used else None
Reader: Final = _used.Reader if _used else None
