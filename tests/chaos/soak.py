"""Faults and load for a long time, and what the processes take: `python -m tests.chaos.soak --minutes 30 --plot s.png`.

Samples go to a CSV file beside the plot. Without matplotlib there is only the CSV file.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.chaos.cluster import Cluster
from tests.chaos.hosts import missing
from tests.chaos.rounds import Rounds, plan
from tests.chaos.run import HOSTS
from tests.support.nodes import wait_until

MORTAL: Final = HOSTS[-1:]
"""Hosts whose processes are killed, and whose nodes are drained. All other nodes live until the end."""
EVERY_S: Final = 2.0
WARM_UP: Final = 0.25
"""Share of the time that the comparison leaves out: arenas and indexes fill first."""
MOST_GROWTH: Final = 1.1
SLACK: Final = {"nbytes": 4 << 20, "descriptors": 16, "threads": 16}
"""What each number may grow in any case. A node learns of connections that a partition has cut after a minute, by TCP
keepalive; each has a descriptor and a thread."""
CLIENT_EVERY: Final = 3
"""After every so many events, a client process is killed and started again."""


class Sample(NamedTuple):
    """What one process takes at one time. `nbytes`: its own memory, without the arena and files."""

    at_s: float
    process: str
    pid: int
    nbytes: int
    descriptors: int
    threads: int


def sample(at_s: float, process: str, pid: int) -> Sample | None:
    """Read what a process takes. None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        nbytes, threads = int(fields["RssAnon"].split()[0]) << 10, int(fields["Threads"])
        return Sample(at_s, process, pid, nbytes, len(os.listdir(f"/proc/{pid}/fd")), threads)
    except (OSError, KeyError):
        return None


def growth(samples: list[Sample]) -> list[str]:
    """Compare the medians of the first and the last quarter after the warm-up, for each process that lived so long.

    Returns a line for each number that grew by more than MOST_GROWTH and SLACK.
    """
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for each in samples:
        by_process[each.process, each.pid].append(each)
    end_s = max(each.at_s for each in samples)
    found = []
    for (process, _), mine in by_process.items():
        late = [each for each in mine if each.at_s >= WARM_UP * end_s]
        if not late or mine[0].at_s > WARM_UP * end_s or mine[-1].at_s < 0.95 * end_s or len(late) < 8:
            continue
        quarter = len(late) // 4
        for field, slack in SLACK.items():
            first, last = (statistics.median(getattr(each, field) for each in part)
                           for part in (late[:quarter], late[-quarter:]))  # fmt: skip
            if last > max(MOST_GROWTH * first, first + slack):
                found.append(f"{process}: {field} grew from {first:,.0f} to {last:,.0f}")
    return found


class Soak:
    """Events, and samples between them.

    Attributes:
        samples: All samples.
        rounds: The events and what became of them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._began_s, self._next_s = cluster, time.monotonic(), 0.0
        self.samples: list[Sample] = []
        self.rounds = Rounds(cluster, self._log)

    def _log(self, line: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.0f} s  {line}", flush=True)

    def run(self, seed: int, seconds: float) -> None:
        for number, event in enumerate(plan(seed, HOSTS, mortal=MORTAL), start=1):
            self.rounds.run(number, event)
            self.sample()
            host = HOSTS[number // CLIENT_EVERY % len(HOSTS)]
            if number % CLIENT_EVERY == 0 and host in self._cluster.owners:  # others could not connect to a node
                self._cluster.restart_client(host)
            while time.monotonic() < self._next_s:
                time.sleep(0.1)
            if time.monotonic() - self._began_s >= seconds:
                return

    def sample(self) -> None:
        at_s = time.monotonic() - self._began_s
        found = (sample(at_s, *each) for each in self._processes())
        self.samples += [each for each in found if each is not None]
        self._next_s = time.monotonic() + EVERY_S

    def _processes(self) -> Iterator[tuple[str, int]]:
        cluster = self._cluster
        assert cluster.directory is not None
        yield "directory", cluster.directory.pid
        for host in cluster.owners:
            pids = cluster.pids(host)
            yield from ((f"{host} {name}", pids[name]) for name in ("node", "supervisor", "owner"))

    def leases_left(self) -> dict[str, int]:
        """End all clients, and wait until the nodes have all slots back. Returns what some node still lends."""
        self._cluster.stop_clients()

        def lent() -> dict[str, int]:
            stats = {host: owner.ask("stats") for host, owner in self._cluster.owners.items()}
            return {host: each["lent_nbytes"] for host, each in stats.items() if each["lent_nbytes"]}

        try:
            wait_until(lambda: not lent(), 30.0)
        except AssertionError:
            pass
        return lent()


def draw(samples: list[Sample], path: Path) -> None:
    """Write the samples as CSV, and as a plot if matplotlib is there."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([Sample._fields, *samples])
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib here: no plot, only the CSV file")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(11, 12), sharex=True)
    by_process: dict[str, list[Sample]] = defaultdict(list)
    for each in samples:
        by_process[each.process].append(each)
    for axis, (field, unit, title) in zip(
        axes,
        [("nbytes", 1 << 20, "own memory, MiB"), ("descriptors", 1, "file descriptors"), ("threads", 1, "threads")],
        strict=True,
    ):
        for process, mine in sorted(by_process.items()):
            minutes = [each.at_s / 60 for each in mine]
            axis.plot(minutes, [getattr(each, field) / unit for each in mine], label=process, linewidth=1)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot: {path}")


def soak(seed: int, minutes: float, plot: Path | None) -> list[str]:
    """Run, and return what went wrong."""
    print(f"replay: python -m tests.chaos.soak --seed {seed} --minutes {minutes:g}", flush=True)
    cluster = Cluster(HOSTS, seed=seed)
    try:
        cluster.start()
        cluster.converge(30.0)
        cluster.start_load()
        running = Soak(cluster)
        running.run(seed, 60 * minutes)
        left = running.leases_left()
    finally:
        cluster.close()
    if plot is not None:
        draw(running.samples, plot)
    done = running.rounds
    print(done.summary(), flush=True)
    problems = [*done.failures, *growth(running.samples)]
    return [*problems, *(f"{host} still lends {nbytes:,} bytes" for host, nbytes in left.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--plot", type=Path)
    given: Any = parser.parse_args()
    if reason := missing():
        print(f"cannot run: {reason}")
        return 2
    problems = soak(given.seed, given.minutes, given.plot)
    print(*(problems or ["flat; no problem"]), sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
