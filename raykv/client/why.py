"""Explains why a chunk was missed, from the answers of all members and from this client's own failed reads."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.client.read_failures import ReadFailure
from raykv.client.router import Router
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import array
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Place, Reason
from raykv.types import KeyArray, NodeId

PART_KEYS: Final = 1 << 12
"""One request asks the members about at most this many keys. The deadline is checked between two requests."""
MAX_OTHER_KEYS: Final = 1 << 18
"""One call of `Client.why` derives at most this many keys under other namespaces."""

WhyReason: TypeAlias = Literal[
    "here", "never_stored", "evicted", "expired", "deleted", "dropped", "corrupt", "demoted", "moved",
    "timed_out", "no_answer", "other_namespace", "not_asked_in_time",
]  # fmt: skip

Derive: TypeAlias = Callable[[Namespace, Sequence[int]], list[bytes | None]]
"""A function that derives keys of chunks under a namespace. Its arguments are the namespace, and the positions of the
chunks in the call of `Client.why`, in rising order. For each position, the function returns a 16-byte key, or None if
the chunk has no key under the namespace."""


@dataclass(frozen=True, slots=True)
class Why:
    """Where one chunk is, or why no node has it.

    Attributes:
        reason: "here": a node holds the chunk.
            "never_stored": no node holds the chunk or remembers its removal.
            "other_namespace": the chunk is or was stored under a namespace that differs in `fields`.
            "no_answer": a node did not answer.
            "timed_out": this client's last read of the chunk reached its deadline.
            "corrupt" with an empty `tier`: this client's last read of the chunk got wrong bytes.
            "not_asked_in_time": the deadline of `why` passed before the chunk was looked up.
            All other reasons say why the chunk was removed from `tier`.
        node: The node that holds or last held the chunk, or that does not answer.
        tier: "dram", "ssd" or "file": where the chunk is, or was last.
        ago_s: Seconds since the chunk was removed, or since the read failed.
        policy: The policy that evicted the chunk.
        fields: Names of the namespace fields that differ.
        nbytes: Length of the chunk if a node holds it, otherwise 0.
        remembers_s: For "never_stored": each node remembers its removals of the last `remembers_s` seconds. None: each
            node remembers all removals since its start.
        announced: Whether the key's owner knows a holder. If not, other hosts do not find the chunk.
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
        where = f"the {self.tier} of {self.node}"
        match self.reason:
            case "here":
                late = "" if self.announced else "; its owner does not know of it yet"
                return f"here: {self.nbytes:,} bytes in {where}{late}"
            case "other_namespace":
                return f"stored under another namespace (in {where}); fields that differ: {', '.join(self.fields)}"
            case "timed_out" | "corrupt" if not self.tier:
                late = "not here by the deadline of the last read"
                what = late if self.reason == "timed_out" else "the last read got wrong bytes"
                return f"{what},{ago}" + (f", from {self.node}" if self.node else "")
            case "no_answer":
                return f"{self.node} does not answer" + (f" ({ago.strip()})" if ago else "")
            case "never_stored":
                back = "they were started" if self.remembers_s is None else f"{_span(self.remembers_s)} ago"
                return f"never stored (the nodes remember since {back})"
            case "not_asked_in_time":
                return "not asked in time; raise timeout_s, or ask about fewer keys at once"
        by = f" by {self.policy}" if self.policy and self.reason == "evicted" else ""
        return f"{self.reason}{by}{ago} from {where}"


class PromptKeys:
    """Derives the keys of a prompt's chunks under several namespaces. Each key is derived only once.

    The chunks of another namespace may have another size. In this case, a given chunk gets the key of the chunk of the
    other namespace that contains the given chunk's last token.
    """

    def __init__(self, tokens: npt.NDArray[np.integer[Any]], chunk_tokens: int) -> None:
        self._tokens, self._chunk_tokens = tokens, chunk_tokens
        self._derived: dict[bytes, list[bytes]] = {}

    def __call__(self, namespace: Namespace, places: Sequence[int]) -> list[bytes | None]:
        """Derive keys: see `Derive`."""
        size, digest = namespace.chunk_tokens, namespace.digest
        theirs = [-(-(place + 1) * self._chunk_tokens // size) - 1 for place in places]
        raw = self._derived.setdefault(digest, [])
        tokens = self._tokens[len(raw) * size : (theirs[-1] + 1) * size]
        raw += split(chunk_keys.chain(digest, tokens, size, parent=raw[-1] if raw else b""))
        return [raw[place] if place < len(raw) else None for place in theirs]


class Inquiry:
    """One call of `Client.why`. Asks all members about the chunks, PART_KEYS at a time, until the deadline."""

    def __init__(
        self, router: Router, namespace: Namespace, derive: Derive, *, elsewhere: bool, deadline_s: float
    ) -> None:
        """Prepare the call. If `elsewhere`, `run` also searches other namespaces, for the keys from `derive`."""
        self._router, self._namespace, self._derive, self._deadline_s = router, namespace, derive, deadline_s
        self._others: list[Namespace] | None = None if elsewhere else []
        self._other_keys = MAX_OTHER_KEYS

    def run(self, count: int) -> list[Why]:
        """Explain `count` chunks. A chunk that is not looked up by the deadline gets "not_asked_in_time"."""
        found: list[Why] = []
        while len(found) < count and not (found and self._late()):
            found += self._explain(range(len(found), min(len(found) + PART_KEYS, count)))
        return found + [Why("not_asked_in_time")] * (count - len(found))

    def _late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _explain(self, places: Sequence[int]) -> Iterator[Why]:
        router, now_s = self._router, time.monotonic()
        keys = [key for key in self._derive(self._namespace, places) if key is not None]
        found, silent, remembers_s = ask_members(router, self._namespace, keys, self._deadline_s)
        elsewhere = self._elsewhere([place for place, why in zip(places, found, strict=True) if why is None])
        absent = Why("never_stored", remembers_s=remembers_s)
        if silent:
            in_time = not places[0] or not self._late()
            absent = Why("no_answer", min(silent)) if in_time else Why("not_asked_in_time")
        for place, key, why in zip(places, keys, found, strict=True):
            why = why or elsewhere.get(place, absent)
            yield _with_failure(why, router.read_failures.last(key, now_s=now_s), now_s)

    def _elsewhere(self, places: list[int]) -> dict[int, Why]:
        """Search other namespaces for chunks, the most similar namespace first."""
        found: dict[int, Why] = {}
        if self._others is None and places:
            stats = self._router.stats(self._deadline_s).values()
            self._others = _alike(self._namespace, {text for each in stats for text in each.get("namespaces", ())})
        for other in self._others or ():
            places = [place for place in places if place not in found]
            self._other_keys -= len(places)
            if not places or self._other_keys < 0 or self._late():
                break
            keys = {place: key for place, key in zip(places, self._derive(other, places), strict=True) if key}
            known, *_ = ask_members(self._router, self._namespace, list(keys.values()), self._deadline_s)
            fields = tuple(self._namespace.differences(other))
            for place, why in zip(keys, known, strict=True):
                if why is not None:
                    found[place] = Why("other_namespace", why.node, why.tier, fields=fields)
        return found


def reasons_of(router: Router, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> Counter[str]:
    """Count the reasons why chunks were missed. `keys` are their 16-byte keys. "arrived": the chunk is stored now."""
    found, silent, _ = ask_members(router, namespace, keys, deadline_s)
    absent = "no_answer" if silent else "never_stored"
    words = (absent if why is None else why.reason for why in found)
    return Counter("arrived" if word == "here" else word for word in words)


def ask_members(
    router: Router, namespace: Namespace, keys: Sequence[bytes], deadline_s: float
) -> tuple[list[Why | None], set[NodeId], float | None]:
    """Ask all members about chunks. `keys` are their 16-byte keys.

    Returns:
        Three values:

        * For each chunk, where it is or how it was removed last; None if no member knows the chunk.
        * The names of the members without a valid answer.
        * The value for `Why.remembers_s`: the shortest time for which a member remembers removals.
    """
    request = messages.Why(b"".join(keys), group=namespace.group.digest)
    outcomes = router.ask_all(request, deadline_s)
    answers = {name: each for name, each in sorted(outcomes.items()) if isinstance(each, messages.Histories)}
    found: list[Why | None] = [None] * len(keys)
    ranks = [(2, 0.0)] * len(keys)
    announced = np.zeros(len(keys), np.bool_)
    for node, answer in answers.items():
        announced |= array(answer.announced, "?", len(keys))
        for place, (rank, why) in enumerate(_histories(node, answer, len(keys))):
            if rank < ranks[place]:
                ranks[place], found[place] = rank, why
    for place in np.flatnonzero(~announced).tolist():
        why = found[place]
        if why is not None and why.reason == "here":
            found[place] = replace(why, announced=False)
    spans_s = [each.remembers_s for each in answers.values() if each.remembers_s is not None]
    return found, set(outcomes) - set(answers), min(spans_s, default=None)


def departures(router: Router, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> list[list[Why]]:
    """Ask all members how chunks left them last. Returns for each key what the members know, also if it is back."""
    answers = router.ask_all(messages.Why(b"".join(keys), group=namespace.group.digest), deadline_s)
    found: list[list[Why]] = [[] for _ in keys]
    for node, answer in answers.items():
        if isinstance(answer, messages.Histories):
            nowhere = bytes([Place.NOWHERE]) * len(keys)
            gone = msgspec.structs.replace(answer, places=nowhere)
            for whys, (_, why) in zip(found, _histories(node, gone, len(keys)), strict=True):
                whys += [why] if why is not None else []
    return found


def _histories(node: NodeId, answer: messages.Histories, count: int) -> Iterator[tuple[tuple[int, float], Why | None]]:
    """Yield for each chunk what one member knows of the chunk, with a rank. The caller uses the lowest rank.

    The ranks from low to high: in memory, in a tier below memory, removed (the later, the lower), not known.
    """
    places, reasons, tiers, policies = (
        array(raw, "u1", count).tolist() for raw in (answer.places, answer.reasons, answer.tiers, answer.policy)
    )
    nbytes, ages_s = array(answer.nbytes, "<u4", count).tolist(), array(answer.ages_s, "<f4", count).tolist()
    for place, size, reason, tier, age_s, policy in zip(places, nbytes, reasons, tiers, ages_s, policies, strict=True):
        word: Any = _word(Reason, reason)
        if place != Place.NOWHERE:
            yield (0, place), Why("here", node, _word(Place, place), nbytes=size)
        elif reason != Reason.NONE:
            name = answer.policies[policy] if policy < len(answer.policies) else ""
            yield (1, age_s), Why(word, node, _word(Place, tier), age_s, name)
        else:
            yield (2, 0.0), None


def _alike(namespace: Namespace, texts: Collection[str]) -> list[Namespace]:
    """List other namespaces under which the same tokens may be stored, the most similar first.

    `texts` are the fields of the quota groups in use, as JSON. A quota group has no salt and no adapter. So each group
    is tried with and without the salt of `namespace`, and with and without the adapter of `namespace`.
    """
    groups = [namespace.group, *map(Namespace.model_validate_json, sorted(texts))]
    made = {
        other.digest: other
        for group in groups
        for salt in dict.fromkeys([namespace.salt, ""])
        for lora in dict.fromkeys([namespace.lora, ""])
        if (other := group.with_fields(salt=salt, lora=lora)) != namespace
    }
    return sorted(made.values(), key=lambda other: len(namespace.differences(other)))


def _with_failure(why: Why, failure: ReadFailure | None, now_s: float) -> Why:
    """Return the read failure as a Why. If there was none, or the chunk was removed after the failure, return `why`."""
    if failure is None:
        return why
    ago_s = now_s - failure.when_s
    if why.ago_s is not None and why.ago_s < ago_s:
        return why
    return Why(failure.kind, failure.node, ago_s=ago_s, nbytes=why.nbytes)


def _word(kind: type[Reason] | type[Place], value: int) -> str:
    """Return the word for an enum value. A node of another version may send a value that is unknown here."""
    try:
        return kind(value).word
    except ValueError:
        return f"{kind.__name__.lower()} {value}"


def _span(seconds: float) -> str:
    """Format a duration for people."""
    for unit, length_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.1f} s"


def split(keys: KeyArray) -> list[bytes]:
    """Return each key as 16 bytes."""
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]
