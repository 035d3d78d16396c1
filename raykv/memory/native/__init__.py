"""`loops` is the module of compiled loops. If `loops` is None, callers use numpy and the standard library instead.

The package build compiles the loops if it finds a C compiler. RAYKV_NATIVE=0 turns the loops off.
"""

from raykv.config import native_wanted

try:
    from raykv.memory.native import _native
except ImportError:
    _built = None
else:
    _built = _native

loops = _built if native_wanted() else None
