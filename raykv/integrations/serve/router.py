"""A request router for Ray Serve: sends each request to the replica that is expected to answer it first.

    request_router_config:
      request_router_class: raykv.integrations.serve.router:RayKVRouter
      request_routing_stats_period_s: 2
      request_router_kwargs: {cluster: default}

`docs/routing.md` describes how it decides.
"""

import asyncio
import logging
import time
from functools import partial
from random import Random
from typing import Any, Final

from pydantic import ValidationError
from ray.serve._private.common import ReplicaID, RunningReplicaInfo
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from raykv.integrations.routing.choice import RouterOptions
from raykv.integrations.routing.prompts import Prompt
from raykv.integrations.routing.report import STATS_KEY, ReplicaReport
from raykv.integrations.routing.routes import Choice, Routes
from raykv.integrations.routing.trail import Routed, Trail
from raykv.integrations.serve.lookup import Found, PromptLookup

log = logging.getLogger("ray.serve")

LOG_INTERVAL_S: Final = 30.0
RECHECK_S: Final = 0.1
"""A request that waits for a prefix looks this often whether it is stored, because it may be sooner than expected."""


class RayKVRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Chooses the replica with the least expected time to the first token.

    Requests whose prompt it cannot read, and all requests while something fails, go by power of two choices. All state
    belongs to this process, and is bounded.

    Attributes:
        trail: The last decisions.
        failures: Number of requests that were routed by power of two choices because of an error.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin without knowledge. `kwargs`: the fields of `RouterOptions`.

        Raises:
            ConfigError: A field is wrong or unknown.
        """
        self._options = RouterOptions.load(kwargs)
        self._routes = Routes(self._options, Random())
        self._lookup = PromptLookup(self._options)
        self._waiting = 0
        self._logged_s = -LOG_INTERVAL_S
        self.failures = 0
        self.trail = Trail()

    # -- Ray Serve's hooks ------------------------------------------------------------------------------------------

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, best first, each as a rank of its own."""
        drawn = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        if pending_request is None or not drawn:
            return drawn
        try:
            ranked = await self._rank(candidate_replicas, pending_request)
        except Exception as error:  # noqa: BLE001 - no request may fail because of its route
            self._log_rarely(error)
            return drawn
        return ranked or drawn

    def _update_running_replicas(self, running_replicas: list[RunningReplicaInfo]) -> None:
        super()._update_running_replicas(running_replicas)
        reports = {info.replica_id.unique_id: _report(info.routing_stats) for info in running_replicas}
        self._routes.update(reports, time.monotonic())
        self._lookup.use([report for report in reports.values() if report is not None])

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Correct the route of a request whose chosen replica was full. Record one for which none was chosen."""
        metadata = pending_request.metadata
        other = self._routes.sent(metadata.internal_request_id, replica_id.unique_id, time.monotonic())
        if other is not None:
            reason, estimated = other
            deployment = self._deployment_id.name
            self._add_to_trail(
                Routed(
                    metadata.request_id,
                    deployment,
                    estimated.replica_id,
                    reason,
                    queue_s=estimated.queue_s,
                    at_s=time.time(),
                )
            )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._routes.end(internal_request_id, replica_id.unique_id, time.monotonic())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._routes.drop(replica_id.unique_id)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _rank(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]] | None:
        """Return the candidates, best first. None: the prompt cannot be read."""
        began_s, wait_began_s, waited_s = time.monotonic(), 0.0, 0.0
        request = pending.args[0] if pending.args else None
        found = await self._lookup.read(request)
        if found is None:
            return None
        request_id = pending.metadata.internal_request_id
        before = self._routes.chosen(request_id)  # Ray Serve asks again and again while all replicas are full
        self._routes.withdraw(request_id)
        preferred = self._with_adapter(candidates, pending)
        named = {replica.replica_id.unique_id: replica for replica in preferred}
        while True:
            choice = await self._choose(found, [*named], waited_s)
            now_s = time.monotonic()
            if not choice.wait_s:
                break
            wait_began_s = wait_began_s or now_s
            self._waiting += 1
            try:
                await asyncio.sleep(min(choice.wait_s, RECHECK_S))
            finally:
                self._waiting -= 1
            waited_s = time.monotonic() - wait_began_s
            found = await self._lookup.read(request) or found  # the names of its chunks may be known by now
        best = choice.order[0]
        self._routes.begin(request_id, found.prompt, choice.order, now_s)
        pending.future.add_done_callback(partial(self._withdraw_cancelled, request_id))
        if before != best.replica_id:
            took_s = time.monotonic() - began_s - waited_s
            self._add_to_trail(self._routed(pending, choice, found.prompt, took_s=took_s, waited_s=waited_s))
        others = [replica for replica in candidates if replica not in preferred]  # if all that are preferred are full
        return [[named[each.replica_id]] for each in choice.order] + ([others] if others else [])

    async def _choose(self, found: Found, candidates: list[str], waited_s: float) -> Choice:
        """Choose a replica. Asks raykv only if its answer may change the choice."""
        stored = self._lookup.here(found)
        if stored is None:
            at_best = self._lookup.at_best(found)
            settled = self._routes.settled(found.prompt, at_best, candidates, now_s=time.monotonic())
            if settled is not None:
                return settled
            stored = await self._lookup.ask(found)
        left_s = self._options.max_wait_s - waited_s if self._may_wait() else 0.0
        return self._routes.choose(found.prompt, stored, candidates, wait_left_s=left_s, now_s=time.monotonic())

    def _withdraw_cancelled(self, request_id: str, future: "asyncio.Future[RunningReplica]") -> None:
        """A client has left before its request was sent to a replica, so no hook of Ray Serve tells its end."""
        if future.cancelled():
            self._routes.withdraw(request_id)

    def _with_adapter(self, candidates: list[RunningReplica], pending: PendingRequest) -> list[RunningReplica]:
        """Return the candidates that have loaded the request's LoRA adapter; all of them if none has."""
        adapter = pending.metadata.multiplexed_model_id
        loaded = self._multiplexed_model_id_to_replica_ids.get(adapter, ()) if adapter else ()
        return [each for each in candidates if each.replica_id in loaded] or candidates

    def _may_wait(self) -> bool:
        """Ray Serve routes few requests at once. At most half of them may wait, so that others get through."""
        return self._waiting < self.max_num_routing_tasks // 2

    def _routed(
        self, pending: PendingRequest, choice: Choice, prompt: Prompt, *, took_s: float, waited_s: float
    ) -> Routed:
        best, *others = choice.order
        return Routed(
            pending.metadata.request_id,
            self._deployment_id.name,
            best.replica_id,
            choice.reason,
            tokens=prompt.tokens,
            cached_tokens=best.cached_tokens,
            load_nbytes=best.load_nbytes,
            compute_tokens=best.compute_tokens,
            queue_s=best.queue_s,
            cost_s=best.cost_s,
            others_s=tuple((each.replica_id, each.cost_s) for each in others[:3]),
            waited_s=waited_s,
            took_s=took_s,
            at_s=time.time(),
        )

    def _add_to_trail(self, routed: Routed) -> None:
        self.trail.add(routed)
        log.debug("%s", routed)
        self._lookup.add_to_trail(routed.request_id, str(routed))

    def _log_rarely(self, error: Exception) -> None:
        self.failures += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            log.warning("raykv: routed by power of two choices (%d times so far): %r", self.failures, error)


def _report(stats: dict[str, Any]) -> ReplicaReport | None:
    """Return a replica's report. None: it has none, or one of another version."""
    try:
        return ReplicaReport.model_validate(stats[STATS_KEY])
    except (KeyError, ValidationError):
        return None
