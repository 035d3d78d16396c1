"""Why a chunk was not there: what all members know of it, and how this client's last read of it failed."""

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
"""Keys of one request: between two requests the deadline is checked."""
MAX_OTHERS: Final = 64
"""Other namespaces that are looked into: those that differ in the fewest fields."""
MAX_OTHER_KEYS: Final = 1 << 18
"""Most keys derived under them by one call."""

WhyReason: TypeAlias = Literal[
    "here", "never_stored", "evicted", "expired", "deleted", "dropped", "corrupt", "demoted",
    "timed_out", "no_answer", "owner_unknown", "other_namespace", "not_asked_in_time",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Why:
    """What became of one chunk.

    Attributes:
        reason: "here": it can be read. "never_stored": no node has it, and none remembers that it left.
            "other_namespace": it is here, or was, under a namespace that differs in `fields`. "no_answer",
            "owner_unknown": the node that would know cannot be asked. "timed_out", "corrupt" (without a tier): so
            ended this client's last read. "not_asked_in_time": the call ended before.
        node: Where it is, or was last, or which node does not answer.
        tier: "dram", "ssd" or "file": where it is, or was last.
        ago_s: How long ago it left, or the read failed.
        policy: The policy that evicted it.
        fields: Names of the namespace's fields that differ.
        nbytes: Its length, if it is here.
        remembers_s: How far back departures are remembered, by the node that remembers least; None: since the nodes
            were started.
        announced: Whether its owner knows a holder; other hosts find it only then.
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
        """The same as a sentence."""
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
    """What one member knows of some keys, one entry a key: see `messages.Histories`."""

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
    """One call of `Client.why`: asks all members about the chunks, part by part, until the deadline."""

    def __init__(self, router: Router, namespace: Namespace, source: KeySource, deadline_s: float) -> None:
        """Ask nothing yet.

        Args:
            deadline_s: Chunks that were not asked about by then get "not_asked_in_time".
        """
        self._router, self._namespace, self._source, self._deadline_s = router, namespace, source, deadline_s
        self._others: list[Namespace] | None = None
        self._other_keys = MAX_OTHER_KEYS

    def run(self) -> list[Why]:
        """One entry a chunk."""
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
        """What became of the chunks from place `first` on."""
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
        """Which chunks are, or were, under another namespace, by place; of several the most alike."""
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
    """The quota groups that the members know."""
    texts = {text for listed in namespaces(router, deadline_s)[0].values() for text in listed}
    return [Namespace.model_validate_json(text) for text in sorted(texts)]


def namespaces(router: Router, deadline_s: float) -> tuple[dict[NodeId, dict[str, Any]], dict[NodeId, str]]:
    """What each member says of each quota group, by the group's fields as JSON; and why other members say nothing."""
    answers = router.ask_all(messages.GetNamespaces(), deadline_s)
    listed = {
        name: msgspec.json.decode(answer.namespaces, type=dict[str, Any])
        for name, answer in answers.items()
        if isinstance(answer, messages.NamespacesAre)
    }
    return listed, {name: str(answer) for name, answer in answers.items() if isinstance(answer, RayKVError)}


def reasons_of(router: Router, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> Counter[str]:
    """Why chunks, by their 16-byte keys, are not there, as counts. "arrived": they are there by now."""
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
    """The answers of the members, and the members that do not answer."""
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
    """What they know of one key: where it is, else its last departure."""
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
    """Other namespaces under which the same tokens may have been stored, the most alike first.

    A quota group does not say which salts and adapters are in use: the caller's are tried, and none.
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
    """The failure of this client's own last read is the better answer, unless the chunk departed since."""
    if failure is None:
        return why
    ago_s = now_s - failure.when_s
    if why.ago_s is not None and why.ago_s < ago_s:
        return why
    return Why(failure.kind, failure.node, ago_s=ago_s, nbytes=why.nbytes)


def _word(kind: type[Reason] | type[Place], value: int) -> str:
    """The word for a number from another node, which may be of another version."""
    return kind(value).word if value in np.array(kind) else f"{kind.__name__.lower()} {value}"


def _span(seconds: float) -> str:
    """A time for people."""
    for unit, length in (("days", 172_800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.1f} s"
