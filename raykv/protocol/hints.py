"""Limits of the hints that callers can give for chunks: time to live, priority, output tokens."""

from typing import Final

from raykv.config import HIGHEST_PRIORITY
from raykv.errors import UsageError

MAX_TTL_S: Final = 365 * 86_400.0
MOST_OUTPUT_TOKENS: Final = (1 << 31) - 1


def require_hints(ttl_s: float | None, priority: int | None, output_tokens: int | None = None) -> None:
    """Raise UsageError if a hint is out of range. None means that the hint was not given."""
    if ttl_s is not None and not 0 <= ttl_s <= MAX_TTL_S:
        raise UsageError(f"field 'ttl_s': {ttl_s} is not in 0 .. {MAX_TTL_S:.0f} s; leave it out for no expiry")
    if priority is not None and not -HIGHEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise UsageError(f"field 'priority': {priority} is not in {-HIGHEST_PRIORITY} .. {HIGHEST_PRIORITY}")
    if output_tokens is not None and not 0 <= output_tokens <= MOST_OUTPUT_TOKENS:
        raise UsageError(f"field 'output_tokens': {output_tokens} is not in 0 .. {MOST_OUTPUT_TOKENS}")
