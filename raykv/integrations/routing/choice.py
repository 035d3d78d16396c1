"""The cost of a request on a replica: the expected time to its first token. No I/O."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from raykv.config import Model, Name
from raykv.integrations.routing.locations import Run, Stored
from raykv.integrations.routing.prompts import Prompt
from raykv.integrations.routing.replicas import Replica

SCHEDULED_STEPS: Final = 2
"""A new request waits for the step that runs, and for the next one, which vLLM schedules before the first has ended."""
WAIT_WEIGHT: Final = 0.25
"""A wait in the router leaves replicas idle, so the work that it saves counts this part of what it counts elsewhere. It
still must count: without it, requests for one new prefix would fill all idle replicas with the same computation."""


class RouterOptions(Model):
    """The fields of `request_router_kwargs`.

    Attributes:
        role: "decode": the engines get the KV of new prompts from prefill engines, so they load what others compute.
        cluster: Name of the raykv cluster.
        address: Address of a raykv node. None: the node on the router's Ray node.
        lookup_timeout_s: If raykv does not answer within this time, the request is routed without its answer.
        tokenize_timeout_s: The tokens of new text are awaited for at most this long. Text without tokens is
            not looked up in raykv, but still goes where the router sent the same text before.
        max_wait_s: A request waits in the router for at most this long until another replica has stored its prefix.
            0: never.
        work_weight: Further weight of each second of load and computation. It stands for the delay of later requests.
            It is up to a quarter more on replicas that got more work of late, and up to a fifth less on others. Without
            it, two idle replicas would compute one prefix twice.
        ongoing_tokens: An answer in progress delays a new request as much as this many tokens of prefill, besides the
            steps that are scheduled already.
    """

    role: Literal["prefill", "decode", "both"] = "both"
    cluster: Name = "default"
    address: str | None = None
    lookup_timeout_s: Annotated[float, Field(gt=0, le=1)] = 0.002
    tokenize_timeout_s: Annotated[float, Field(gt=0, le=1)] = 0.003
    max_wait_s: Annotated[float, Field(ge=0, le=60)] = 2.0
    work_weight: Annotated[float, Field(ge=0, le=100)] = 1.0
    ongoing_tokens: Annotated[int, Field(ge=0, le=65_536)] = 64


class Rates(NamedTuple):
    """What an engine is expected to take for a token of a prefill, and for a step with few tokens.

    A request takes one step at least.
    """

    token_s: float
    step_s: float = 0.0


class Estimate(NamedTuple):
    """The expected cost of a request on one replica.

    Attributes:
        cached_tokens: Leading tokens that the engine has or is computing, in whole blocks.
        stored_tokens: Leading tokens that it has or loads from what is stored now.
        load_nbytes, load_s: What it loads after them.
        compute_tokens, compute_s: What it computes, without its step.
        queue_s: Wait for earlier requests. ongoing_s: delay by their answers.
        step_s: The step that computes. Requests behind it do not wait for another one, because they share steps.
        extra_s: `work_weight` times the time of load and computation.
        share: Factor of `extra_s`: the replica's recent work as a part of the mean, within limits.
    """

    replica_id: str
    cached_tokens: int
    stored_tokens: int
    load_nbytes: int
    load_s: float
    compute_tokens: int
    compute_s: float
    queue_s: float
    ongoing_s: float
    step_s: float
    extra_s: float
    share: float = 1.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.ongoing_s + self.load_s + self.compute_s + self.step_s

    @property
    def cost_s(self) -> float:
        return self.ttft_s + self.share * self.extra_s

    @property
    def wait_cost_s(self) -> float:
        """The cost that tells whether a wait in the router gains: without `share`, and with less for the work."""
        return self.ttft_s + WAIT_WEIGHT * self.extra_s

    @property
    def reason(self) -> str:
        if self.cached_tokens:
            return "cached"
        return "stored" if self.stored_tokens else "queue"


def estimate(
    replica_id: str,
    replica: Replica,
    prompt: Prompt,
    stored: Stored,
    *,
    options: RouterOptions,
    rates: Rates,
    now_s: float,
) -> Estimate:
    """Estimate the cost of a prompt on a replica.

    Args:
        stored: The chunks of the prompt in raykv.
        rates: Those of the replica's engine.
    """
    token_s, step_s = rates
    segments = replica.cached(prompt.keys)
    cached = prompt.ends[segments - 1] if segments else 0
    if replica.engine is not None:  # an engine's cache works in whole blocks
        cached -= cached % replica.engine.hash_tokens
    loaded_to, load_nbytes, load_s = _load(replica, cached, stored, token_s)
    # The last token is always computed, because its output is needed.
    compute = max(prompt.tokens - max(cached, loaded_to), 1)
    if options.role == "decode" and replica.engine is not None and compute > 1:
        nbytes = compute * replica.engine.chunk_nbytes // replica.engine.chunk_tokens
        load_nbytes, load_s, compute = load_nbytes + nbytes, load_s + nbytes * replica.assumed["far"], 1
    compute_s = compute * token_s
    answers_s = replica.answering(now_s) * options.ongoing_tokens * token_s
    return Estimate(
        replica_id,
        min(cached, prompt.tokens),
        max(cached, loaded_to),
        load_nbytes,
        load_s,
        compute,
        compute_s,
        replica.queue_s(now_s),
        answers_s + (SCHEDULED_STEPS * step_s if replica.ongoing else 0.0),
        step_s,
        options.work_weight * (load_s + compute_s),
    )


def _load(replica: Replica, cached: int, stored: Stored, token_s: float) -> tuple[int, int, float]:
    """Return up to which token a load reaches, its bytes, and its time. The engine computes what it computes sooner."""
    engine = replica.engine
    if engine is None or not engine.chunk_nbytes or replica.digest != stored.digest:
        return 0, 0, 0.0
    size, nbytes, seconds = engine.chunk_tokens, 0, 0.0
    begin = at = cached // size
    for run in stored.runs:
        if run.stop > at:
            part = (run.stop - at) * engine.chunk_nbytes
            nbytes, seconds = nbytes + part, seconds + part * replica.seconds_per_byte(run.holders, below=run.below)
            at = run.stop
    if seconds > (at - begin) * size * token_s:
        return 0, 0, 0.0
    return (at * size, nbytes, seconds) if at > begin else (0, 0, 0.0)


def with_prefix(stored: Stored, chunks: int, holders: Sequence[str], digest: bytes) -> Stored:
    """Return what will be stored when an engine has computed the first `chunks` chunks."""
    if chunks <= stored.chunks:
        return stored
    return Stored((*stored.runs, Run(chunks, tuple(holders))), digest)


def after(estimated: Estimate, wait_s: float) -> Estimate:
    """Return the estimate of a request that waits in the router first. The replica's queue gets shorter meanwhile."""
    return estimated._replace(queue_s=max(estimated.queue_s, wait_s))
