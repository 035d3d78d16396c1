"""Hints of requests: how long to keep a request's chunks, and when its session ends.

Hints come with requests, so they are untrusted. A wrong hint is ignored, and the request goes on without it. No hint
lasts longer than `max_hint_s`.

A request does no harm to chunks that other requests stored: its hints can only prolong their time to live and raise
their priority. A short time to live or a low priority applies only to chunks that the request itself stores.

When a session ends, its chunks are marked for early eviction, except those that other sessions of this engine use. The
next read of a chunk removes its mark.
"""

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raykv.config import HIGHEST_PRIORITY
from raykv.integrations.vllm.sessions import Sessions, Turn
from raykv.types import Hints, KeyArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from raykv import Client
    from raykv.integrations.vllm.groups import Hashes

PARAMETER: Final = "raykv_hints"
"""The key of the hints in a request's `kv_transfer_params`."""
PROTOCOL_VERSIONS: Final = ("0.1", "1.0")
"""The versions of vLLM's `KvHintsEnvelope` that are understood."""
MAX_ACTIONS: Final = 16
"""Only this many actions of an envelope are read."""
MAX_FIELDS: Final = 16
"""Hints with more fields than this are ignored unread."""
MAX_SESSION_ID: Final = 256
"""Longest session id, in characters. Longer ids are ignored."""
DEFAULT_RETENTION_S: Final = 3600.0
"""A priority above 0 lasts this long if the request gives no time."""
SAVE_WAIT_S: Final = 0.02
"""If some chunks of an ended request were not stored yet, its hints are sent again after this time."""

SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ModelT = TypeVar("ModelT", bound=BaseModel)


class _Own(BaseModel):
    """raykv's own hints. `docs/vllm.md` describes the fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    ttl_s: Seconds | None = None
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] | None = None
    pin_s: Seconds | None = None
    session_end: bool = False
    store_decode: bool | None = None


class _Lenient(BaseModel):
    """Base class for the parts of vLLM's `KvHintsEnvelope`. Fields that raykv does not need are not read."""

    model_config = ConfigDict(strict=True, frozen=True, from_attributes=True)


class _Envelope(_Lenient):
    protocol_version: str
    actions: list[Any]


class _Action(_Lenient):
    action_type: str
    action_version: str
    payload: Any


class _Retain(_Lenient):
    priority: Annotated[int, Field(ge=0)]
    ttl_seconds: Seconds
    include_current_request: bool = True


class _Release(_Lenient):
    session_id: SessionId | None = None
    include_current_request: bool = True


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request.

    Attributes:
        session: Id of the request's session. Empty: the request names no session.
        ttl_s: Time to live of the chunks that the request stores. 0: the namespace's config decides.
        priority: Priority of the chunks that the request stores. It is above 0 only if `ttl_s` is set, and it ends when
            that time is over.
        retention: (Seconds, priority): after the request has ended, all its chunks are retained for this time, with at
            least this priority. None: they are not retained.
        ends: Whether the session ends with the request.
        ended: Ids of other sessions that end with the request.
        store_decode: Whether to store chunks that fill up while decoding. None: the connector's config decides.
    """

    session: str = ""
    ttl_s: float = 0.0
    priority: int = 0
    retention: tuple[float, int] | None = None
    ends: bool = False
    ended: frozenset[str] = frozenset()
    store_decode: bool | None = None

    @property
    def of_stored(self) -> Hints | None:
        """Expiry and priority of the chunks that the request stores; None if the namespace's config decides."""
        return Hints(self.ttl_s, self.priority) if self.ttl_s or self.priority else None

    @property
    def after_end(self) -> bool:
        """Whether there is something to record or send when the request has ended."""
        return bool(self.session or self.retention or self.ends or self.ended)


@dataclass(slots=True)
class Parsed:
    """The checked hints of a request.

    Attributes:
        hints: The valid hints.
        used: Number of valid hints.
        ignored: For each ignored hint, its place and the reason.
    """

    hints: RequestHints
    used: int = 0
    ignored: list[str] = field(default_factory=list)


NO_HINTS: Final = RequestHints()
NOTHING: Final = Parsed(NO_HINTS)


def parse(request: "Request", max_hint_s: float) -> Parsed:
    """Read the hints of a request: `raykv_hints` in `kv_transfer_params`, `kv_hints`, and `session_id`.

    Args:
        max_hint_s: Longer times are cut to this limit. 0: hints are not read.
    """
    params, envelope, session = request.kv_transfer_params, request.kv_hints, request.session_id
    own = params.get(PARAMETER) if isinstance(params, Mapping) else None
    if not max_hint_s or (own is None and envelope is None and not session):
        return NOTHING
    reader = _Reader(max_hint_s)
    if session:
        reader.read_session(session)
    if own is not None:
        reader.read_own(PARAMETER, own)
    if envelope is not None:
        reader.read_envelope(envelope)
    return reader.finish()


class _Reader:
    """Collects the hints of one request. Of two hints about the same thing, the later one counts."""

    def __init__(self, max_hint_s: float) -> None:
        self._max_hint_s = max_hint_s
        self._session = ""
        self._ttl_s = 0.0
        self._priority = 0
        self._retention: tuple[float, int] | None = None
        self._ends = False
        self._ended: set[str] = set()
        self._store_decode: bool | None = None
        self._used = 0
        self._ignored: list[str] = []

    def finish(self) -> Parsed:
        ttl_s, priority, retention = self._ttl_s, self._priority, self._retention
        if priority > 0:
            retention = retention or (ttl_s or self._clip(DEFAULT_RETENTION_S), priority)
            priority = priority if ttl_s else 0
        if self._ends:
            retention = None
        elif retention is not None:
            ttl_s = ttl_s and max(ttl_s, retention[0])
        elif ttl_s:
            # A retention also prolongs chunks of other requests. The lowest priority leaves their priority unchanged.
            retention = (ttl_s, -HIGHEST_PRIORITY)
        ended = frozenset(self._ended)
        hints = RequestHints(self._session, ttl_s, priority, retention, self._ends, ended, self._store_decode)
        return Parsed(hints, self._used, self._ignored)

    def read_session(self, session: Any) -> None:
        if isinstance(session, str) and len(session) <= MAX_SESSION_ID:
            self._session = session
            self._used += 1
        else:
            self._ignore("session_id", f"give text of at most {MAX_SESSION_ID} characters")

    def read_own(self, where: str, fields: Any) -> None:
        if isinstance(fields, Mapping) and len(fields) > MAX_FIELDS:
            self._ignore(where, f"raykv knows {', '.join(_Own.model_fields)}")
            return
        own = self._checked(_Own, where, fields)
        if own is None:
            return
        if own.ttl_s is not None:
            self._ttl_s = self._clip(own.ttl_s)
        if own.priority is not None:
            self._priority = own.priority
        if own.pin_s is not None:
            self._retention = (self._clip(own.pin_s), HIGHEST_PRIORITY)
        self._ends = self._ends or own.session_end
        if own.store_decode is not None:
            self._store_decode = own.store_decode
        self._used += 1

    def read_envelope(self, envelope: Any) -> None:
        checked = self._checked(_Envelope, "kv_hints", envelope)
        if checked is None:
            return
        if checked.protocol_version not in PROTOCOL_VERSIONS:
            self._ignore("kv_hints.protocol_version", f"raykv understands {', '.join(PROTOCOL_VERSIONS)}")
            return
        for place, each in enumerate(checked.actions[:MAX_ACTIONS]):
            where = f"kv_hints.actions[{place}]"
            if action := self._checked(_Action, where, each):
                self._read_action(where, action)
        if len(checked.actions) > MAX_ACTIONS:
            self._ignore("kv_hints.actions", f"only the first {MAX_ACTIONS} are read")

    def _read_action(self, where: str, action: _Action) -> None:
        """Read one action. Unknown types are skipped without an error, because they are meant for other programs."""
        if action.action_type not in ("raykv.hints", "kv.retain", "kv.evict", "kv.demote"):
            return
        if action.action_version != "1.0":
            self._ignore(f"{where}.action_version", f"raykv understands {action.action_type} 1.0")
        elif action.action_type == "raykv.hints":
            self.read_own(f"{where}.payload", action.payload)
        elif action.action_type == "kv.retain":
            retain = self._checked(_Retain, f"{where}.payload", action.payload)
            if retain is not None and retain.include_current_request:
                self._retention = (self._clip(retain.ttl_seconds), min(retain.priority, HIGHEST_PRIORITY))
                self._used += 1
        else:
            release = self._checked(_Release, f"{where}.payload", action.payload)
            if release is not None and release.session_id not in (None, self._session):
                self._ended.add(release.session_id)
                self._used += 1
            elif release is not None and release.include_current_request:
                self._ends = True
                self._used += 1

    def _checked(self, model: type[ModelT], where: str, fields: Any) -> ModelT | None:
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            # The sender chose the name of the field, so it is quoted and shortened.
            inside = "".join(f".{part!r:.40}" for part in problem["loc"])
            self._ignore(f"{where}{inside}", problem["msg"])
            return None

    def _clip(self, seconds: float) -> float:
        return min(seconds, self._max_hint_s)

    def _ignore(self, where: str, reason: str) -> None:
        self._ignored.append(f"hint {where}: {reason}")


class HintSender:
    """Sends the hints of ended requests to the nodes. Only one thread may use it."""

    def __init__(self, names: Callable[["Hashes"], list[bytes]], save_wait_s: float = SAVE_WAIT_S) -> None:
        """Start without sessions.

        Args:
            names: Maps the engine's hashes of a request to the names of all its chunks.
            save_wait_s: If some chunks were not stored yet, hints are sent again after this time. 0: never again.
        """
        self._names, self._sessions, self._save_wait_s = names, Sessions(), save_wait_s

    def send(
        self, clients: Collection["Client"], hints: RequestHints, tenant: Hashable, hashes: "Hashes", prompt: int
    ) -> None:
        """Send the hints of a request that has ended.

        Args:
            clients: The clients to send with, one for each rank.
            tenant: Identifies the tenant. Sessions of different tenants differ, even if their ids are equal.
            hashes: The engine's hashes of the request.
            prompt: How many of the hashes belong to the prompt.
        """
        names = self._names(hashes)
        if not names:
            return
        session = (tenant, hints.session or names[-1])  # a request without a session id is a session by itself
        marked: list[bytes] = []
        if hints.session or hints.ends:
            of_prompt = set(self._names(hashes[:prompt]))
            turn = Turn(list(hashes[:prompt]), [name for name in names if name not in of_prompt])
            marked += self._sessions.add(session, names, turn)
        ended = [(tenant, each) for each in sorted(hints.ended)] + [session] * hints.ends
        marked += [name for each in ended for name in self._sessions.pop(each)]
        calls: list[Callable[[], bool]] = []
        for client in clients:
            if marked:
                calls.append(partial(_reaches_all, client.session_end, client.keys(marked)))
            if hints.retention is not None:
                retain = partial(client.retain, ttl_s=hints.retention[0], priority=hints.retention[1])
                calls.append(partial(_reaches_all, retain, client.keys(names)))
        reached = [call() for call in calls]
        if self._save_wait_s and not all(reached):
            time.sleep(self._save_wait_s)
            for call in calls:
                call()


def _reaches_all(call: Callable[[KeyArray], int], keys: KeyArray) -> bool:
    return call(keys) >= len(keys)
