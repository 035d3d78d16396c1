"""The compiled loops (`_native.c`), or None where they were not built: then numpy and the standard library do the same.

They are built with the package when a C compiler is there. RAYKV_NATIVE=0 leaves them unused. Both ways pass the same
tests.
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
look: Final = _used.look if _used else None
enter: Final = _used.enter if _used else None
check: Final = _used.check if _used else None
sort_out: Final = _used.sort_out if _used else None
survey: Final = _used.survey if _used else None
chain: Final = _used.chain if _used else None
note_slots: Final = _used.note_slots if _used else None
add_up: Final = _used.add_up if _used else None
read: Final = _used.read if _used else None
hold: Final = _used.hold if _used else None
wrap: Final = _used.wrap if _used else None
fill: Final = _used.fill if _used else None
share: Final = _used.share if _used else None
receive: Final = _used.receive if _used else None
copy: Final = _used.copy if _used else None
quickest: Final = _used.quickest if _used else None
vectors: Final = _used.vectors if _used else None
Reader: Final = _used.Reader if _used else None
