"""Why a chunk was not there: what all members know of it, and what this client remembers."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.client.read_failures import Trouble
from raykv.client.router import Router
from raykv.errors import RayKVError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Place, Reason
from raykv.types import KeyArray, NodeId

MAX_OTHERS: Final = 64
"""Other namespaces that are looked into: those that differ in the fewest fields."""
MAX_OTHER_KEYS: Final = 1 << 18
"""Keys that are made under them, in all."""

WhyReason: TypeAlias = Literal[
    "here", "being_written", "never_stored", "evicted", "expired", "deleted", "dropped", "corrupt", "demoted",
    "timed_out", "no_answer", "owner_unknown", "other_namespace",
]  # fmt: skip

KeysUnder = Callable[[Namespace], list[bytes | None]]
"""The keys that the same tokens or names have under another namespace, 16 bytes each; None where they have none."""


@dataclass(frozen=True, slots=True)
class Why:
    """What became of one chunk.

    Attributes:
        reason: "here": it can be read. "never_stored": nobody has it, and nobody remembers that it went.
            "other_namespace": it is here, or was, under a namespace that differs in `fields`. "no_answer" and
            "owner_unknown": who would know cannot be asked. "timed_out": so ended this client's last read.
        node: Where it is, or whence it went, or who does not answer.
        tier: "dram", "ssd" or "file": where it is, or whence it went.
        ago_s: How long ago it went, or the read failed.
        policy: By which it was evicted.
        fields: Names of the namespace's fields that differ.
        nbytes: Its length, if it is here.
        remembers_s: For how long back departures are remembered, by the node that remembers least; None: since the
            nodes were started.
        announced: Whether its owner knows who holds it; other hosts find it only then.
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
                late = "" if self.announced else "; its owner has not heard of it yet"
                return f"here: {self.nbytes:,} bytes in the {self.tier} of {self.node}{late}"
            case "being_written":
                return f"being written to {self.node}"
            case "evicted":
                by = f" by {self.policy}" if self.policy else ""
                return f"evicted{by}{ago} from the {self.tier} of {self.node}"
            case "other_namespace":
                where = f"in the {self.tier} of {self.node}" if self.tier else f"of {self.node}"
                return f"stored under another namespace ({where}); fields that differ: {', '.join(self.fields)}"
            case "timed_out" | "corrupt" if not self.tier:
                what = "not here by the deadline of the last read" if self.reason == "timed_out" else "wrong bytes came"
                return f"{what},{ago}" + (f", from {self.node}" if self.node else "")
            case "no_answer":
                return f"{self.node} does not answer" + (f" ({ago.strip()})" if ago else "")
            case "owner_unknown":
                return "nobody owns it: the cluster has no members"
            case "never_stored":
                back = "they were started" if self.remembers_s is None else f"{_span(self.remembers_s)} ago"
                return f"never stored, as far as the nodes remember (since {back})"
        return f"{self.reason}{ago} from the {self.tier} of {self.node}"


class _Known(NamedTuple):
    """What one member says of some keys: see `messages.Told`."""

    node: NodeId
    told: messages.Told
    places: bytes
    nbytes: list[int]
    reasons: bytes
    tiers: bytes
    ages_s: list[float]
    policies: bytes  # places in `told.policies`
    announced: bytes


def explain(
    router: Router, namespace: Namespace, keys: KeyArray, under: KeysUnder | None, deadline_s: float
) -> list[Why]:
    """What became of the chunks of `namespace` with these keys, one entry each.

    Args:
        under: Makes their keys under other namespaces; None if all we have is the keys.
        deadline_s: Members that take longer do not answer.
    """
    said, silent = _ask(router, keys, deadline_s)
    raw = split(keys)
    found = [_from_members(said, place) for place in range(len(keys))]
    unknown = [place for place, why in enumerate(found) if why is None]
    elsewhere: dict[int, Why] = {}
    if unknown and under is not None:
        elsewhere = _in_other_namespaces(router, namespace, unknown, under, deadline_s)
    back = [each.told.remembers_s for each in said if each.told.remembers_s is not None]
    owners = router.view(deadline_s).ring.owners(keys)
    nodes, now_s, reasons = router.view(deadline_s).ring.nodes, time.monotonic(), []
    for place, (key, why) in enumerate(zip(raw, found, strict=True)):
        why = why or elsewhere.get(place)
        if why is None:
            owner = nodes[owners[place]] if owners[place] >= 0 else None
            if owner is None:
                why = Why("owner_unknown")
            elif silent:
                why = Why("no_answer", owner if owner in silent else min(silent))
            else:
                why = Why("never_stored", remembers_s=min(back, default=None))
        reasons.append(_with_trouble(why, router.read_failures.of(key, now_s=now_s), now_s))
    return reasons


def groups(router: Router, deadline_s: float) -> list[Namespace]:
    """The quota groups that the members know."""
    texts = {text for said in namespaces(router, deadline_s)[0].values() for text in said}
    return [Namespace.model_validate_json(text) for text in sorted(texts)]


def namespaces(router: Router, deadline_s: float) -> tuple[dict[NodeId, dict[str, Any]], dict[NodeId, str]]:
    """What each member says of each quota group, by its fields as JSON; and why others say nothing."""
    answers = router.ask_all(messages.GetNamespaces(), deadline_s)
    said = {
        name: msgspec.json.decode(answer.namespaces, type=dict[str, Any])
        for name, answer in answers.items()
        if isinstance(answer, messages.NamespacesAre)
    }
    return said, {name: str(answer) for name, answer in answers.items() if isinstance(answer, RayKVError)}


def reasons_of(router: Router, keys: Sequence[bytes], deadline_s: float) -> Counter[str]:
    """Why chunks, by their 16-byte keys, are not there, as counts. "arrived": they are there by now."""
    said, silent = _ask(router, chunk_keys.from_bytes(b"".join(keys)), deadline_s)
    reasons: Counter[str] = Counter()
    for place in range(len(keys)):
        why = _from_members(said, place)
        if why is None:
            reasons["no_answer" if silent else "never_stored"] += 1
        else:
            reasons["arrived" if why.reason in ("here", "being_written") else why.reason] += 1
    return reasons


def _ask(router: Router, keys: KeyArray, deadline_s: float) -> tuple[list[_Known], set[NodeId]]:
    """What the members say, and who says nothing."""
    answers = router.ask_all(messages.Why(chunk_keys.to_bytes(keys)), deadline_s)
    said, count = [], len(keys)
    for name, answer in answers.items():
        if isinstance(answer, messages.Told) and len(answer.places) == count:
            said.append(
                _Known(
                    name,
                    answer,
                    answer.places,
                    messages.array(answer.nbytes, "<u4", count).tolist(),
                    messages.array(answer.reasons, "u1", count).tobytes(),
                    messages.array(answer.tiers, "u1", count).tobytes(),
                    messages.array(answer.ages_s, "<f4", count).tolist(),
                    messages.array(answer.policy, "u1", count).tobytes(),
                    messages.array(answer.announced, "u1", count).tobytes(),
                )
            )
    return said, set(answers) - {each.node for each in said}


def _from_members(said: Sequence[_Known], place: int) -> Why | None:
    """What they know of one key: where it is, else its last departure."""
    announced = any(each.announced[place] for each in said)
    here = [each for each in said if each.places[place] != Place.NOWHERE]
    if here:
        each = min(here, key=lambda each: (not each.nbytes[place], each.places[place], each.node))
        nbytes, tier = each.nbytes[place], _word(Place, each.places[place])
        reason: WhyReason = "here" if nbytes else "being_written"
        return Why(reason, each.node, tier, nbytes=nbytes, announced=announced)
    went = [each for each in said if each.reasons[place] != Reason.NONE]
    if not went:
        return None
    each = min(went, key=lambda each: (each.ages_s[place], each.node))
    word: Any = _word(Reason, each.reasons[place])
    names, number = each.told.policies, each.policies[place]
    policy = names[number] if number < len(names) else ""
    return Why(word, each.node, _word(Place, each.tiers[place]), each.ages_s[place], policy)


def _in_other_namespaces(
    router: Router, namespace: Namespace, places: list[int], under: KeysUnder, deadline_s: float
) -> dict[int, Why]:
    """Which of the chunks are, or were, under a namespace that differs, by place; of several the most alike."""
    others = _alike(namespace, groups(router, deadline_s))[: max(1, min(MAX_OTHERS, MAX_OTHER_KEYS // len(places)))]
    asked: list[tuple[int, Namespace]] = []
    raw: list[bytes] = []
    for other in others:
        theirs = under(other)
        for place in places:
            key = theirs[place]
            if key is not None:
                asked.append((place, other))
                raw.append(key)
    if not raw:
        return {}
    found: dict[int, Why] = {}
    said, _ = _ask(router, chunk_keys.from_bytes(b"".join(raw)), deadline_s)
    for number, (place, other) in enumerate(asked):
        why = _from_members(said, number)
        best = found.get(place)
        if why is not None and (best is None or (why.reason == "here" and not best.nbytes)):
            fields = tuple(namespace.differences(other))
            found[place] = replace(why, reason="other_namespace", ago_s=None, policy="", fields=fields)
    return found


def _alike(namespace: Namespace, known: Sequence[Namespace]) -> list[Namespace]:
    """Other namespaces under which the same tokens may have been stored, the most alike first.

    An quota group does not tell which salts and adapters are in use: ours are tried, and none.
    """
    made = {
        other.digest: other
        for group in [namespace.group, *known]
        for salt in dict.fromkeys([namespace.salt, ""])
        for lora in dict.fromkeys([namespace.lora, ""])
        if (other := group.with_fields(salt=salt, lora=lora)) != namespace
    }
    return sorted(made.values(), key=lambda other: len(namespace.differences(other)))


def _with_trouble(why: Why, trouble: Trouble | None, now_s: float) -> Why:
    """This client's own last read tells more than where the chunk is now, unless it went since."""
    if trouble is None:
        return why
    ago_s = now_s - trouble.when_s
    if why.ago_s is not None and why.ago_s < ago_s:
        return why
    return Why(trouble.kind, trouble.node, ago_s=ago_s, nbytes=why.nbytes)


def keys_under_names(names: Sequence[bytes | str]) -> KeysUnder:
    """For objects with these names."""
    return lambda other: list(split(chunk_keys.named(other.digest, names)))


def keys_under_tokens(namespace: Namespace, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> KeysUnder:
    """For the chunks of a prompt. Where chunks are of another length, the one with the last token of ours."""

    def under(other: Namespace) -> list[bytes | None]:
        mine, theirs = namespace.chunk_tokens, other.chunk_tokens
        raw = split(chunk_keys.chain(other.digest, tokens, theirs))
        ends = range(mine, len(tokens) + 1, mine)
        return [raw[place] if (place := -(-end // theirs) - 1) < len(raw) else None for end in ends]

    return under


def split(keys: KeyArray) -> list[bytes]:
    """Each key as 16 bytes."""
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]


def _word(kind: type[Reason] | type[Place], value: int) -> str:
    """The word for a number from another node, which may be of another version."""
    return kind(value).word if value in np.array(kind) else f"{kind.__name__.lower()} {value}"


def _span(seconds: float) -> str:
    """A time for people."""
    for unit, length in (("days", 172_800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.1f} s"
