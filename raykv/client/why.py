"""Explains misses: from what all members know of a chunk, and from the failure of this client's last read of it."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from raykv.client.key_sources import KeySource, split
from raykv.client.read_failures import ReadFailure
from raykv.client.router import Router
from raykv.errors import RayKVError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Place, Reason
from raykv.types import KeyArray, NodeId

PART_KEYS: Final = 1 << 12
"""Most keys of one request. The deadline is checked between two requests."""
MAX_OTHERS: Final = 64
"""Most other namespaces to search. Those that differ in the fewest fields are searched first."""
MAX_OTHER_KEYS: Final = 1 << 18
"""Most keys that one call derives under other namespaces."""

WhyReason: TypeAlias = Literal[
    "here", "never_stored", "evicted", "expired", "deleted", "dropped", "corrupt", "demoted",
    "timed_out", "no_answer", "owner_unknown", "other_namespace", "not_asked_in_time",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Why:
    """Where one chunk is, or why no node has it.

    Attributes:
        reason: "here": a node holds the chunk. "never_stored": no node holds the chunk or remembers its removal.
            "other_namespace": the chunk is or was stored under a namespace that differs in `fields`. "no_answer": a
            node did not answer. "owner_unknown": the cluster has no members. "timed_out", "corrupt" (without a tier):
            this client's last read failed so. "not_asked_in_time": the deadline passed before the lookup.
        node: The node that holds or last held the chunk, or that does not answer.
        tier: "dram", "ssd" or "file": where the chunk is, or was last.
        ago_s: Seconds since the chunk was removed, or since the read failed.
        policy: The policy that evicted the chunk.
        fields: Names of the namespace fields that differ.
        nbytes: Length of the chunk, if the reason is "here".
        remembers_s: Age in seconds of the oldest removal that every node still remembers. None: all removals since the
            nodes were started.
        announced: Whether the owner knows a holder. If not, other hosts do not find the chunk.
    """

    reason: WhyReason
    node: NodeId | None = None
    tier: str = ""
    ago_s: float | None = None
    policy: str = ""
    fields: tuple[str, ...] = ()
    nbytes: int = 0
    remembers_s: float | None = None
    announced: bool = True

    @property
    def text(self) -> str:
        """The explanation as a sentence."""
        ago = "" if self.ago_s is None else f" {_span(self.ago_s)} ago"
        match self.reason:
            case "here":
                late = "" if self.announced else "; its owner does not know of it yet"
                return f"here: {self.nbytes:,} bytes in the {self.tier} of {self.node}{late}"
            case "evicted":
                by = f" by {self.policy}" if self.policy else ""
                return f"evicted{by}{ago} from the {self.tier} of {self.node}"
            case "other_namespace":
                where = f"in the {self.tier} of {self.node}" if self.tier else f"of {self.node}"
                return f"stored under another namespace ({where}); fields that differ: {', '.join(self.fields)}"
            case "timed_out" | "corrupt" if not self.tier:
                late = "not here by the deadline of the last read"
                what = late if self.reason == "timed_out" else "the last read got wrong bytes"
                return f"{what},{ago}" + (f", from {self.node}" if self.node else "")
            case "no_answer":
                return f"{self.node} does not answer" + (f" ({ago.strip()})" if ago else "")
            case "owner_unknown":
                return "nobody owns it: the cluster has no members"
            case "never_stored":
                back = "they were started" if self.remembers_s is None else f"{_span(self.remembers_s)} ago"
                return f"never stored (the nodes remember since {back})"
            case "not_asked_in_time":
                return "not asked in time; raise timeout_s, or ask about fewer keys at once"
        return f"{self.reason}{ago} from the {self.tier} of {self.node}"


_NOT_ASKED: Final = Why("not_asked_in_time")


class _Answer(NamedTuple):
    """What one member knows of the keys, one entry per key: see `messages.Histories`."""

    node: NodeId
    histories: messages.Histories
    places: bytes
    nbytes: list[int]
    reasons: bytes
    tiers: bytes
    ages_s: list[float]
    policies: bytes
    announced: bytes


class Inquiry:
    """One call of `Client.why`. Asks all members about the chunks, PART_KEYS at a time, until the deadline."""

    def __init__(self, router: Router, namespace: Namespace, source: KeySource, deadline_s: float) -> None:
        self._router, self._namespace, self._source, self._deadline_s = router, namespace, source, deadline_s
        self._others: list[Namespace] | None = None
        self._other_keys = MAX_OTHER_KEYS

    def run(self) -> list[Why]:
        """Return one entry per chunk. Chunks after the deadline get "not_asked_in_time"."""
        found: list[Why] = []
        while len(found) < len(self._source):
            if found and self._late():
                return found + [_NOT_ASKED] * (len(self._source) - len(found))
            keys = self._source.keys(len(found), min(len(found) + PART_KEYS, len(self._source)))
            found += self._explain(keys, len(found))
        return found

    def _late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _explain(self, keys: KeyArray, first: int) -> list[Why]:
        """Explain the chunks with these keys. `first`: position of the first key in the call."""
        router, now_s = self._router, time.monotonic()
        answers, silent = _ask(router, keys, self._namespace, self._deadline_s)
        if first and silent and self._late():
            return [_NOT_ASKED] * len(keys)
        found = [_from_members(answers, place) for place in range(len(keys))]
        unknown = [first + place for place, why in enumerate(found) if why is None]
        elsewhere = self._elsewhere(unknown) if unknown else {}
        spans = (each.histories.remembers_s for each in answers)
        remembers_s = min((span for span in spans if span is not None), default=None)
        ring = router.view(self._deadline_s).ring
        owners = ring.owners(keys).tolist()
        reasons = []
        for place, (key, why) in enumerate(zip(split(keys), found, strict=True)):
            why = why or elsewhere.get(first + place)
            if why is None:
                owner = ring.nodes[owners[place]] if owners[place] >= 0 else None
                if owner is None:
                    why = Why("owner_unknown")
                elif silent:
                    why = Why("no_answer", owner if owner in silent else min(silent))
                else:
                    why = Why("never_stored", remembers_s=remembers_s)
            reasons.append(_with_failure(why, router.read_failures.last(key, now_s=now_s), now_s))
        return reasons

    def _elsewhere(self, places: list[int]) -> dict[int, Why]:
        """Find chunks under other namespaces, by position. The most similar namespace is preferred."""
        if self._others is None:
            self._others = _alike(self._namespace, quota_groups(self._router, self._deadline_s))
        asked: list[tuple[int, Namespace]] = []
        raw: list[bytes] = []
        for other in self._others[:MAX_OTHERS]:
            if self._late() or self._other_keys < len(places):
                break
            self._other_keys -= len(places)
            for place, key in zip(places, self._source.keys_under(other, places), strict=True):
                if key is not None:
                    asked.append((place, other))
                    raw.append(key)
        found: dict[int, Why] = {}
        for start in range(0, len(raw), PART_KEYS):
            if self._late():
                break
            part = chunk_keys.from_bytes(b"".join(raw[start : start + PART_KEYS]))
            answers, _ = _ask(self._router, part, self._namespace, self._deadline_s)
            for number, (place, other) in enumerate(asked[start : start + PART_KEYS]):
                why, best = _from_members(answers, number), found.get(place)
                if why is not None and (best is None or (why.reason == "here" and not best.nbytes)):
                    fields = tuple(self._namespace.differences(other))
                    found[place] = replace(why, reason="other_namespace", ago_s=None, policy="", fields=fields)
        return found


def quota_groups(router: Router, deadline_s: float) -> list[Namespace]:
    texts = {text for listed in namespaces(router, deadline_s)[0].values() for text in listed}
    return [Namespace.model_validate_json(text) for text in sorted(texts)]


def namespaces(router: Router, deadline_s: float) -> tuple[dict[NodeId, dict[str, Any]], dict[NodeId, str]]:
    """Return each member's report per quota group (its fields as JSON), and the errors of silent members."""
    answers = router.ask_all(messages.GetNamespaces(), deadline_s)
    listed = {
        name: msgspec.json.decode(answer.namespaces, type=dict[str, Any])
        for name, answer in answers.items()
        if isinstance(answer, messages.NamespacesAre)
    }
    return listed, {name: str(answer) for name, answer in answers.items() if isinstance(answer, RayKVError)}


def reasons_of(router: Router, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> Counter[str]:
    """Count the reasons why chunks were missed, given their 16-byte keys. "arrived": the chunk is stored now."""
    answers, silent = _ask(router, chunk_keys.from_bytes(b"".join(keys)), namespace, deadline_s)
    reasons: Counter[str] = Counter()
    for place in range(len(keys)):
        why = _from_members(answers, place)
        if why is None:
            reasons["no_answer" if silent else "never_stored"] += 1
        else:
            reasons["arrived" if why.reason == "here" else why.reason] += 1
    return reasons


def _ask(router: Router, keys: KeyArray, namespace: Namespace, deadline_s: float) -> tuple[list[_Answer], set[NodeId]]:
    """Ask all members. Returns their answers, and the names of members without a valid answer."""
    request = messages.Why(chunk_keys.to_bytes(keys), group=namespace.group.digest)
    outcomes = router.ask_all(request, deadline_s)
    answers, count = [], len(keys)
    for name, answer in outcomes.items():
        if isinstance(answer, messages.Histories) and len(answer.places) == count:
            answers.append(
                _Answer(
                    name,
                    answer,
                    answer.places,
                    array(answer.nbytes, "<u4", count).tolist(),
                    array(answer.reasons, "u1", count).tobytes(),
                    array(answer.tiers, "u1", count).tobytes(),
                    array(answer.ages_s, "<f4", count).tolist(),
                    array(answer.policy, "u1", count).tobytes(),
                    array(answer.announced, "u1", count).tobytes(),
                )
            )
    return answers, set(outcomes) - {each.node for each in answers}


def _from_members(answers: Sequence[_Answer], place: int) -> Why | None:
    """Return where a chunk is, or else its last removal. None: no member knows the chunk."""
    announced = any(each.announced[place] for each in answers)
    here = [each for each in answers if each.places[place] != Place.NOWHERE]
    if here:
        each = min(here, key=lambda each: (each.places[place], each.node))
        tier = _word(Place, each.places[place])
        return Why("here", each.node, tier, nbytes=each.nbytes[place], announced=announced)
    departed = [each for each in answers if each.reasons[place] != Reason.NONE]
    if not departed:
        return None
    each = min(departed, key=lambda each: (each.ages_s[place], each.node))
    word: Any = _word(Reason, each.reasons[place])
    names, number = each.histories.policies, each.policies[place]
    policy = names[number] if number < len(names) else ""
    return Why(word, each.node, _word(Place, each.tiers[place]), each.ages_s[place], policy)


def _alike(namespace: Namespace, known: Sequence[Namespace]) -> list[Namespace]:
    """List other namespaces under which the same tokens may be stored, the most similar first.

    A quota group does not list its salts and adapters. So this tries the caller's values and empty values.
    """
    made = {
        other.digest: other
        for group in [namespace.group, *known]
        for salt in dict.fromkeys([namespace.salt, ""])
        for lora in dict.fromkeys([namespace.lora, ""])
        if (other := group.with_fields(salt=salt, lora=lora)) != namespace
    }
    return sorted(made.values(), key=lambda other: len(namespace.differences(other)))


def _with_failure(why: Why, failure: ReadFailure | None, now_s: float) -> Why:
    """Return the failure of this client's last read. Return `why` if there is none, or if the removal is newer."""
    if failure is None:
        return why
    ago_s = now_s - failure.when_s
    if why.ago_s is not None and why.ago_s < ago_s:
        return why
    return Why(failure.kind, failure.node, ago_s=ago_s, nbytes=why.nbytes)


def _word(kind: type[Reason] | type[Place], value: int) -> str:
    """The word for an enum value. A node of another version may send values that are unknown here."""
    return kind(value).word if value in np.array(kind) else f"{kind.__name__.lower()} {value}"


def _span(seconds: float) -> str:
    """Format a duration for people."""
    for unit, length in (("days", 172_800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.1f} s"
