"""The hand-off of a request while its prompt is still being computed.

The decode engine gets the request at the same time as the prefill engine. It waits until the first chunk is stored.
Then it loads each chunk as soon as the prefill engine has stored it. When the prefill engine has ended the request, it
leaves a note with its tickets, so that no decode engine waits for chunks that do not come.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from raykv.errors import RayKVError
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.lookups import NOTHING, Found, Lookups, Prompt
from raykv.integrations.vllm.metadata import Scope
from raykv.protocol.namespace import Namespace
from raykv.protocol.ticket import HAND_OFF, MAX_HAND_OFF

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from raykv import Client

NOTES: Final = Namespace(model="raykv hand-offs")
"""The notes are chunks of this namespace. The name of a note is the id of its hand-off."""
NOTE_NBYTES: Final = 4096
NOTE_TTL_S: Final = 60.0
NOTE_TIMEOUT_S: Final = 1.0
MIN_PAUSE_S: Final = 0.005
PAUSE_SHARE: Final = 1 / 16
MAX_PAUSE_S: Final = 0.1
"""A pause between two looks for a prefill engine's chunks is this share of the time waited so far, within these limits.
So a wait costs little if it is long: a prefill engine on the same host gets the processor."""
NOTE_POLL_S: Final = 0.05
NOTE_PAUSES: Final = 4
"""A note is looked up at this interval, or after this many pauses if that is later."""


def id_of(request: "Request", hash_tokens: int) -> str:
    """Return the id of the hand-off that a request belongs to. Empty if there is none, or if it is not valid.

    The prompts of one call for completions come with the same text. The hash of a prompt's last whole block tells them
    apart; both engines have it.
    """
    found = (request.kv_transfer_params or {}).get(HAND_OFF)
    if not isinstance(found, str) or not 0 < len(found) <= MAX_HAND_OFF:
        return ""
    hashes = request.block_hashes[: request.num_prompt_tokens // hash_tokens]
    return f"{found} {hashes[-1].hex() if hashes else ''}"


def pause_s(waited_s: float) -> float:
    """Return how long one who has waited this long for a prefill engine may pause before the next look."""
    return min(max(MIN_PAUSE_S, PAUSE_SHARE * waited_s), MAX_PAUSE_S)


class Notes:
    """Leaves and reads notes. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def leave(self, hand_off: str, tickets: Sequence[dict[str, Any]]) -> None:
        """Store a note with these tickets. If they are too long, the note has none. Errors of the store are dropped."""
        client = self._connection.client(NOTES, Scope())
        if client is None:
            return
        text = json.dumps(tickets).encode()
        note = (text if len(text) <= NOTE_NBYTES else b"[]").ljust(NOTE_NBYTES)
        try:
            client.put([hand_off.encode()], [note], chained=False, ttl_s=NOTE_TTL_S, timeout_s=NOTE_TIMEOUT_S)
        except RayKVError:
            return  # the decode engine finds the chunks without a note, and waits longer for those that do not come

    def read(self, hand_off: str, timeout_s: float) -> Any:
        """Return the tickets of a note; None if there is no note. Their content is not checked."""
        client = self._connection.client(NOTES, Scope())
        if client is None:
            return None
        keys, into = client.keys([hand_off.encode()]), bytearray(NOTE_NBYTES)
        if (
            client.locate(keys, timeout_s=timeout_s) == [None]
            or not client.get(keys, [into], timeout_s=timeout_s).prefix
        ):
            return None
        try:
            return json.loads(bytes(into))
        except ValueError:
            return []


@dataclass(slots=True)
class _Awaited:
    """A lookup that waits for a prefill engine. `look_s`, `note_s`: when to look next, and when for the note."""

    scope: Scope
    prompt: Prompt
    hand_off: str
    began_s: float
    future: Future[Found]
    look_s: float = 0.0
    note_s: float = 0.0


class PrefillWaiter:
    """Waits, on one thread for all requests, until prefill engines have stored first chunks or have left notes."""

    def __init__(self, config: ConnectorConfig, lookups: Lookups, notes: Notes) -> None:
        self._config, self._lookups, self._notes = config, lookups, notes
        self._lock = threading.Lock()
        self._awaited: list[_Awaited] = []
        self._closing = threading.Event()
        self._is_running = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-hand-off")

    def begin(self, scope: Scope, prompt: Prompt, hand_off: str) -> Future[Found]:
        """Begin to wait. Cancel the result to end the wait.

        Returns:
            The chunks to load. If the prefill engine still computes some of them, `Found.is_expected` is True. The
            result is NOTHING after `hand_off_timeout_s`, or while no node is connected.
        """
        awaited = _Awaited(scope, prompt, hand_off, time.monotonic(), Future[Found]())
        with self._lock:
            self._awaited.append(awaited)
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._run)
        return awaited.future

    def close(self) -> None:
        """End the thread. Lookups that still wait find nothing."""
        self._closing.set()
        self._thread.shutdown(wait=True)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._awaited = [each for each in self._awaited if not each.future.done()]
                awaited = list(self._awaited)
                self._is_running = bool(awaited)
            if not awaited:
                return
            now_s = time.monotonic()
            for each in awaited:
                if now_s >= each.look_s or self._closing.is_set():
                    each.look_s = now_s + pause_s(now_s - each.began_s)
                    self._resolve(each, now_s)
            self._closing.wait(MIN_PAUSE_S)

    def _resolve(self, awaited: _Awaited, now_s: float) -> None:
        try:
            found = self._look(awaited, now_s)
        except Exception as error:  # noqa: BLE001 - the hook that takes the result raises it again
            if awaited.future.set_running_or_notify_cancel():
                awaited.future.set_exception(error)
            return
        if found is not None and awaited.future.set_running_or_notify_cancel():
            awaited.future.set_result(found)

    def _look(self, awaited: _Awaited, now_s: float) -> Found | None:
        """Return what to load; None if nothing is known yet."""
        lookups, scope, prompt = self._lookups, awaited.scope, awaited.prompt
        if self._closing.is_set() or not lookups.clients(scope):
            return NOTHING
        if lookups.has_first(scope, prompt):
            found = lookups.ask(scope, prompt)
            if found.hit.tokens > prompt.computed:
                return lookups.expected(found, prompt)
        if now_s >= awaited.note_s:
            awaited.note_s = now_s + _note_pause_s(now_s - awaited.began_s)
            tickets = self._notes.read(awaited.hand_off, self._config.lookup_timeout_s)
            if tickets is not None:
                named = lookups.redeem(scope, prompt, tickets)
                if lookups.is_longest(named, prompt):
                    return named
                return max(named, lookups.ask(scope, prompt), key=lambda each: each.hit.tokens)
        return NOTHING if now_s > awaited.began_s + self._config.hand_off_timeout_s else None


class PrefillChunks:
    """Waits for the chunks of one prompt that a prefill engine computes. Used by one thread."""

    def __init__(
        self, notes: Notes, hand_off: str, *, timeout_s: float, closing: threading.Event, clock: Callable[[], float]
    ) -> None:
        """`timeout_s`: after this time without a new chunk, the prefill engine counts as stopped."""
        self._notes, self._hand_off, self._timeout_s = notes, hand_off, timeout_s
        self._closing, self._clock = closing, clock
        self._has_ended = False

    def wait(self, clients: "Sequence[Client]", names: list[bytes]) -> int:
        """Wait until the first of these chunks is stored under all ranks.

        Returns:
            How many leading chunks are stored. 0: the prefill engine has ended without them, or has stopped.
        """
        began_s = self._clock()
        until_s, note_s = began_s + self._timeout_s, began_s + NOTE_POLL_S
        while True:
            stored = min(self._leading(client, names, until_s) for client in clients)
            if stored or self._has_ended or self._clock() >= until_s:
                return stored
            if self._clock() >= note_s:
                note_s = self._clock() + _note_pause_s(self._clock() - began_s)
                self._has_ended = self._notes.read(self._hand_off, self._timeout_s) is not None
            if not self._has_ended and self._closing.wait(pause_s(self._clock() - began_s)):
                return 0

    def _leading(self, client: "Client", names: list[bytes], until_s: float) -> int:
        keys, left_s = client.keys(names), max(0.0, until_s - self._clock())
        if client.locate(keys[:1], timeout_s=left_s) == [None]:
            return 0
        return len(list(takewhile(bool, client.locate(keys, timeout_s=left_s))))


def _note_pause_s(waited_s: float) -> float:
    return max(NOTE_POLL_S, NOTE_PAUSES * pause_s(waited_s))
