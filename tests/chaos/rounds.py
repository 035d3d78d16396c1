"""Rounds of faults: a seed gives a plan, and each round of it is one event under load, its end, and convergence."""

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tests.chaos.cluster import DIRECTORY, Cluster
from tests.chaos.hosts import both_ways

CONVERGED_S: Final = 5.0
PATIENCE_S: Final = 30.0
"""A cluster that has not converged by then ends the run. One that takes longer than CONVERGED_S fails its round."""
SOON_S: Final = 1.0
"""While a fault lasts, what a host has stored is found by hosts that the fault does not touch within this time."""
LONGEST_S: Final = 3.5
KINDS: Final = ("kill", "kill_supervisor", "pause", "partition", "one_way", "loss", "rate", "clock", "move")


@dataclass(frozen=True, slots=True)
class Event:
    """What happens in one round.

    Attributes:
        kind: One of KINDS; "move" is either "drain" or "join" in a plan.
        host: The host that it happens to.
        lasts_s: How long it lasts.
        other: The other side of a partition, a host or "all"; or the process that is paused.
        amount: Loss in percent, rate in Mbit/s, or the jump of the clock in seconds.
    """

    kind: str
    host: str
    lasts_s: float = 0.0
    other: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind, self.host, self.other, f"{self.amount:g}" if self.amount else ""]
        return " ".join(filter(None, [*parts, f"{self.lasts_s:.1f} s" if self.lasts_s else ""]))


def plan(seed: int, hosts: list[str], *, longest_s: float = LONGEST_S, mortal: Sequence[str] = ()) -> Iterator[Event]:
    """Yield events without end. At most one host is without a node: the round after next brings it back.

    Args:
        longest_s: A fault lasts at most this long.
        mortal: Only nodes of these hosts are killed, drained or joined; empty: those of all hosts.
    """
    rng, away = random.Random(seed), ""
    absent = 0
    deck: list[str] = []
    while True:
        if away and absent >= 1:
            yield Event("join", away)
            away = ""
            continue
        absent += bool(away)
        if not deck:
            deck = rng.sample(KINDS, len(KINDS))  # each kind once, in random order
        kind = deck.pop()
        ends = kind in ("kill", "kill_supervisor", "move")
        choice = [each for each in (mortal if ends and mortal else hosts) if each != away]
        if not choice or (kind == "move" and away):
            continue
        host = rng.choice(choice)
        if kind == "move":
            away, absent = host, 0
            yield Event("drain", host)
        else:
            yield _event(kind, host, [each for each in hosts if each != host], rng, longest_s)


def _event(kind: str, host: str, others: list[str], rng: random.Random, longest_s: float) -> Event:
    lasts_s = round(rng.uniform(0.3, longest_s), 1)
    match kind:
        case "pause":
            return Event(kind, host, lasts_s, rng.choice(["node", "node", "owner", "supervisor", "directory"]))
        case "partition" | "one_way":
            other = rng.choice([*others, "all", DIRECTORY])
            turned = kind == "one_way" and other != "all" and rng.random() < 0.5
            return Event(kind, other if turned else host, lasts_s, host if turned else other)
        case "loss":
            return Event(kind, host, lasts_s, amount=rng.choice([1, 3, 10, 20]))
        case "rate":
            return Event(kind, host, lasts_s, amount=rng.choice([5, 20, 100]))
        case "clock":
            return Event(kind, host, amount=rng.choice([-86_400, -30, 30, 86_400]))
    return Event(kind, host)


class Rounds:
    """Runs events on a cluster under load.

    Attributes:
        converged_s: How long each round took to converge.
        found_s: How long chunks of hosts that a fault did not touch took to be found, while the fault lasted.
        failures: What broke a bar.
    """

    def __init__(self, cluster: Cluster, log: Callable[[str], None] = print) -> None:
        self._cluster, self._log = cluster, log
        self.converged_s: list[float] = []
        self.found_s: list[float] = []
        self.failures: list[str] = []

    def run(self, number: int, event: Event) -> None:
        """Run one round: the event, its end, and convergence. Adds what broke a bar to `failures`."""
        cluster = self._cluster
        try:
            self._happen(event)
            took_s = cluster.converge(PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"round {number} ({event}): {error}") from error
        found, problems = cluster.collect(), cluster.problems
        cluster.problems = []
        self.converged_s.append(took_s)
        if took_s > CONVERGED_S:
            problems = [*problems, f"converged after {took_s:.2f} s; waited for {cluster.waited_for}"]
        if not found["match"]:
            problems = [*problems, "no client worked"]
        self.failures += [f"round {number} ({event}): {problem}" for problem in problems]
        self._log(
            f"round {number:3} {event!s:32} converged in {took_s:5.2f} s, {found.total():6} counts, "
            f"{found['hit']} hits, {found['missed']} misses, {len(problems)} problems"
        )
        for problem in problems[:5]:
            self._log(f"    {problem}")

    def summary(self) -> str:
        """Return the sums of all rounds, in one line."""
        results, overruns_s = self._cluster.results, self._cluster.overruns_s
        operations = sum(results[name] for name in ("match", "get", "put", "flush", "exists", "locate"))
        median_s, found_s = statistics.median(self.converged_s), max(self.found_s, default=0.0)
        chunks = ", ".join(f"{results[name]} {name}" for name in ("hit", "missed", "stored", "skipped"))
        return (
            f"{len(self.converged_s)} rounds, {operations} operations; chunks: {chunks}; "
            f"converged in {median_s:.2f} s (median), {max(self.converged_s):.2f} s (worst); "
            f"found during faults in {found_s:.2f} s (worst of {len(self.found_s)}); "
            f"worst overrun {1e3 * overruns_s[0]:.0f} ms, {1e3 * overruns_s[1]:.0f} ms without other processes; "
            f"{len(self.failures)} failures"
        )

    def _happen(self, event: Event) -> None:
        if not event.lasts_s:
            self._strike(event.kind, event.host, event.amount)
            return
        until_s = time.monotonic() + event.lasts_s
        with self._fault(event):
            self._use_others(event)
            time.sleep(max(0.0, until_s - time.monotonic()))

    def _use_others(self, event: Event) -> None:
        """While the fault lasts, hosts that still reach each other find what one of them stores."""
        if event.kind in ("loss", "rate") or event.other in ("directory", DIRECTORY):
            return
        fine = set(self._cluster.owners) - {event.host if event.other not in self._cluster.hosts else event.other}
        hosts = sorted(fine, key=lambda host: (host != event.host, host))  # one that cannot reach another stores
        time.sleep(SOON_S)  # the fault must have an effect
        self.found_s.append(self._cluster.found_after(hosts, PATIENCE_S))
        if self.found_s[-1] > SOON_S:
            problem = f"chunks of {hosts[0]} were found on {hosts[1]} only after {self.found_s[-1]:.2f} s"
            self._cluster.problems.append(problem)

    def _strike(self, kind: str, host: str, amount: float) -> None:
        """Do what needs no end."""
        cluster = self._cluster
        match kind:
            case "join":
                cluster.start_node(host)
                cluster.wait_ready()
            case "drain":
                cluster.drain(host)
            case "kill":
                os.kill(cluster.pids(host)["node"], signal.SIGKILL)
            case "kill_supervisor":
                os.kill(cluster.pids(host)["supervisor"], signal.SIGKILL)
                cluster.owners[host].wait()
                cluster.restart_ended()
            case "clock":
                cluster.set_clock(host, amount)

    @contextmanager
    def _fault(self, event: Event) -> Iterator[None]:
        """A fault that begins and ends."""
        cluster, network, host = self._cluster, self._cluster.network, event.host
        match event.kind:
            case "pause":
                pid = self._pid(host, event.other)
                cluster.pause(pid)
                yield
                cluster.resume(pid)
            case "loss":
                network.set_loss(host, event.amount)
                yield
                network.set_loss(host, 0)
            case "rate":
                network.set_rate(host, event.amount)
                yield
                network.set_rate(host, 0)
            case _:
                pairs = self._cut_pairs(event)
                for pair in pairs:
                    network.cut(*pair)
                yield
                for pair in pairs:
                    network.mend(*pair)

    def _cut_pairs(self, event: Event) -> list[tuple[str, str]]:
        """Return the (sender, receiver) pairs that a partition cuts."""
        others = [*self._cluster.hosts, DIRECTORY] if event.other == "all" else [event.other]
        pairs = both_ways([event.host], others)
        return pairs if event.kind == "partition" else [pair for pair in pairs if pair[0] == event.host]

    def _pid(self, host: str, process: str) -> int:
        if process == "directory":
            assert self._cluster.directory is not None
            return self._cluster.directory.pid
        return self._cluster.pids(host)[process]
