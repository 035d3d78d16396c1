"""Remembers the chunks of recent sessions, to find chunks that nobody needs once a turn or a session has ended."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MAX_SESSION_CHUNKS: Final = 1 << 18
"""At most this many chunks of sessions are remembered. Beyond that, the least recently used sessions are forgotten."""


class Turn(NamedTuple):
    """One request of a session. The request has ended.

    Attributes:
        prompt: The engine's hashes of the prompt.
        generated: Names of the chunks with generated tokens.
    """

    prompt: Sequence[bytes]
    generated: list[bytes]


@dataclass(slots=True)
class _Session:
    """What is known of one session.

    Attributes:
        chunks: Names of its chunks, in order of their first use.
        shared: The hashes of its last prompt without the final hash, as (number of these hashes, last of these hashes).
            A prompt that continues the conversation begins with these hashes. The final hash is left out, because a
            chat template may change its tokens.
        generated: Names of the chunks that its last request generated.
    """

    chunks: dict[bytes, None] = field(default_factory=dict)
    shared: tuple[int, bytes] = (0, b"")
    generated: list[bytes] = field(default_factory=list)

    def is_continued_by(self, turn: Turn) -> bool:
        """Return whether the turn's prompt begins with the session's last prompt, and is longer."""
        count, last = self.shared
        return count > 0 and len(turn.prompt) > count + 1 and turn.prompt[count - 1] == last


class Sessions:
    """The chunks of recent sessions, by name. Only one thread may use this object."""

    def __init__(self, most_chunks: int = MAX_SESSION_CHUNKS) -> None:
        self._most_chunks, self._count = most_chunks, 0
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._users: OrderedDict[bytes, Hashable] = OrderedDict()  # by chunk: its only session; None if it has several

    def add(self, session: Hashable, names: Iterable[bytes], turn: Turn) -> list[bytes]:
        """Remember the chunks of a request that has ended.

        Returns:
            The superseded chunks: the session's previous request generated them, and this request continues the
            conversation without them. Such chunks are common, because most chat templates drop the reasoning of earlier
            turns.
        """
        known = self._sessions.pop(session, None) or _Session()
        self._count -= len(known.chunks)
        used = dict.fromkeys(names)
        for name in used:
            user = self._users.pop(name, session)
            self._users[name] = session if user == session else None
        superseded = [name for name in known.generated if name not in used] if known.is_continued_by(turn) else []
        known.chunks |= used
        known.generated = turn.generated
        known.shared = (len(turn.prompt) - 1, turn.prompt[-2]) if len(turn.prompt) > 1 else (0, b"")
        self._sessions[session] = known
        self._count += len(known.chunks)
        while self._count > self._most_chunks:
            self._count -= len(self._sessions.popitem(last=False)[1].chunks)
        while len(self._users) > self._most_chunks:
            self._users.popitem(last=False)
        return superseded

    def pop(self, session: Hashable) -> list[bytes]:
        """Forget a session. Return its chunks, without those that another session uses, such as a system prompt."""
        chunks = self._sessions.pop(session, _Session()).chunks
        self._count -= len(chunks)
        return [name for name in chunks if self._users.get(name) == session]
