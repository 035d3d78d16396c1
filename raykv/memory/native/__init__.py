"""The compiled loops, each of them None where it was not built: then numpy and the standard library do the same.

They are built with the package when a C compiler is there. RAYKV_NATIVE=0 leaves them unused. The same tests pass with
and without them.
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
