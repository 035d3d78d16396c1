"""Compares raykv with other stores and with the machine's limits, on the same objects, in interleaved rounds.

    python -m benchmarks.compare [--quick] [--rounds N] [--runs N] [--peers a,b] [--json FILE] [--from FILE ...]

Prints tables, then the bars: figures that raykv must reach, and whether they are met. Judge raykv by the medians of
three runs: use `--runs 3`, or `--from` with the files of three runs. All TCP sockets have the system's congestion
control. benchmarks/README.md describes each line of the tables. If a peer cannot be installed or started, its name and
the reason are printed, and the other peers are measured.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import bars, environments, machine, report
from benchmarks.environments import ROOT, Environment
from benchmarks.lineup import (
    LOCAL,
    LOOKUPS,
    MIXED,
    PEERS,
    QUICK_PEERS,
    RAYKV,
    REMOTE,
    Phase,
    Row,
    peer_of,
    workloads,
)
from benchmarks.processes import Spec, Worker, WorkerError
from benchmarks.workloads import GIB, KIB, MIB, STORE_NBYTES

MIXED_STORE_NBYTES: Final = 512 * MIB
MIXED_FILL_S: Final = 2.0
MIXED_MARGIN_S: Final = 0.3
"""The writer begins this long before the counted reads, and ends this long after them."""
STARTUP_ARENA_NBYTES: Final = 16 * GIB
LOOKUP_ROWS: Final = 1_000_000
LOOKUP_MANY_ROWS: Final = 10_000_000
LOOKUP_FILL_S: Final = 20.0
"""A store is filled for at most this long. Only the keys that it has by then are looked up."""
QUICK_LOOKUP_PEERS: Final = {"redis", "memcached"}
"""With `--quick`, lookups are measured only on these peers, because they store a million objects in two seconds."""
QUICK_MIXED_PEERS: Final = {"mooncake", "memcached"}
LAST: Final = ROOT / ".cache" / "bench" / "last.json"


class Run:
    """One run of all measurements.

    Attributes:
        results: The content of the JSON file.
    """

    def __init__(self, *, rounds: int, peers: set[str], quick: bool, write_rate: int) -> None:
        self._rounds, self._peers, self._quick, self._write_rate = rounds, peers, quick, write_rate
        self._began_s = time.monotonic()
        self._workers: list[Worker] = []
        self._missing: dict[str, str] = {}
        self._about: dict[str, Any] = {}
        self._wrong: list[str] = []
        self.results: dict[str, Any] = {
            "machine": machine.facts(),
            "quick": quick,
            "rounds": rounds,
            "peers": sorted(peers),
            "missing": self._missing,
            "about": self._about,
            "wrong": self._wrong,
            "cells": [],
            "lookups": [],
            "mixed": [],
        }

    def everything(self) -> None:
        """Install the peers and measure. Then end all processes and remove all temporary files."""
        specs = [spec for phase in (LOCAL, REMOTE) for spec in phase.only(self._peers).specs]
        self._environments = environments.prepare({spec.environment for spec in specs} | {environments.CHART})
        self._say("environments are ready")
        self.results["install_s"] = time.monotonic() - self._began_s
        self._scratch = Path(tempfile.mkdtemp(prefix="rkb-"))
        self._shm = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
        before = {path.name for path in Path("/dev/shm").iterdir()}
        try:
            self._phase(LOCAL.only(self._peers))
            self._phase(REMOTE.only(self._peers))
            self._startup()
            self._lookups()
            self._mixed()
        finally:
            self._stop_all()
            shutil.rmtree(self._scratch, ignore_errors=True)
            shutil.rmtree(self._shm, ignore_errors=True)
            left = {path.name for path in Path("/dev/shm").iterdir()} - before
            if left:
                self._say(f"new in /dev/shm, maybe others': {', '.join(sorted(left))}")
        self.results["took_s"] = time.monotonic() - self._began_s

    def _say(self, words: str) -> None:
        print(f"== {time.monotonic() - self._began_s:5.0f} s: {words}", flush=True)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start(self, spec: Spec, *, store_nbytes: int, tag: str, shared: dict[str, Any] | None = None) -> Worker | None:
        environment = self._environments.get(spec.environment, Environment(Path(sys.executable)))
        if environment.problem:
            self._miss(spec, environment.problem)
            return None
        made = Worker(
            spec,
            environment,
            scratch=self._scratch,
            shm=self._shm,
            store_nbytes=store_nbytes,
            shared=shared,
            tag=tag,
        )
        self._workers.append(made)
        return made

    def _miss(self, spec: Spec, why: str) -> None:
        if spec.name not in self._missing:
            self._say(f"{spec.name} IS MISSING: {why}")
        self._missing[spec.name] = why

    def _stop_all(self, *, but: Worker | None = None) -> None:
        for worker in self._workers:
            if worker is not but:
                worker.stop()
        self._workers = [worker for worker in self._workers if worker is but]

    # -- local and remote -------------------------------------------------------------------------------------------

    def _phase(self, phase: Phase) -> None:
        wanted = workloads(phase.name, quick=self._quick)
        sizes = sorted({workload.nbytes for workload in wanted} - {0} | {16 * KIB})
        workers: dict[str, Worker] = {}
        for spec in phase.specs:
            started = self._start(spec, store_nbytes=STORE_NBYTES, tag=f" {phase.name}")
            if started is not None:
                workers[spec.name] = started
        for name, worker in list(workers.items()):
            try:
                self._about[name] = worker.ask("prepare", sizes=sizes)["about"]
            except WorkerError as error:
                self._miss(worker.spec, str(error))
                del workers[name]
        self._say(f"{phase.name}: {len(workers)} workers are ready")
        rows = [row for row in phase.rows if row.worker in workers]
        for number in range(self._rounds + 1):  # the first round warms up and is not counted
            for place, workload in enumerate(wanted):
                shift = (number + place) % len(rows)
                for row in rows[shift:] + rows[:shift]:
                    self._cell(phase, row, workers[row.worker], workload, number)
            self._say(f"{phase.name}: round {number} of {self._rounds}")
        self._stop_all()

    def _cell(self, phase: Phase, row: Row, worker: Worker, workload: Any, number: int) -> None:
        fields = {"operation": workload.operation, "nbytes": workload.nbytes, "batch": workload.batch}
        try:
            measured = worker.ask("measure", face=row.face, workload=fields, round=number)
        except WorkerError as error:
            if number <= 1:
                self._say(f"{phase.name}, {row.label}, {workload.name}: FAILED: {error}")
            if "WrongBytesError" in str(error):
                self._wrong.append(f"{phase.name}, {row.label}, {workload.name}")
            measured = {"error": str(error)}
        if number and "unsupported" not in measured:
            cell = {"phase": phase.name, "row": row.label, "workload": workload.name, "round": number}
            self.results["cells"].append({**cell, **measured})

    # -- start-up ---------------------------------------------------------------------------------------------------

    def _startup(self) -> None:
        """Measure how long a raykv node takes to start."""
        worker = self._start(Spec("raykv", "raykv_store", "", {"idle": True}), store_nbytes=0, tag=" special")
        assert worker is not None
        try:
            times = [
                worker.ask("special", name="startup", arena_nbytes=STARTUP_ARENA_NBYTES)
                for _ in range(self._rounds + 1)
            ]
            self.results["startup"] = times[1:]
            self._say("start-up: done")
        except WorkerError as error:
            self._say(f"start-up: FAILED: {error}")
        self._stop_all()

    # -- lookups among very many keys -------------------------------------------------------------------------------

    def _lookups(self) -> None:
        """Measure lookups: all stores in turn, with LOOKUP_ROWS keys; then raykv alone, with LOOKUP_MANY_ROWS keys."""
        peers = self._peers & QUICK_LOOKUP_PEERS if self._quick else self._peers
        workers: dict[str, Worker] = {}
        for label, spec in LOOKUPS:
            if peer_of(spec) in {"", *peers} and spec.name not in self._missing:
                worker = self._start(spec, store_nbytes=STORE_NBYTES, tag=" lookups")
                if worker is not None and self._filled(label, worker, LOOKUP_ROWS):
                    workers[label] = worker
        labels = list(workers)
        for number in range(self._rounds + 1):  # the first round warms up and is not counted
            shift = number % max(1, len(labels))
            for label in labels[shift:] + labels[:shift]:
                self._look_up(label, workers[label], number)
        ours = workers.get(RAYKV)
        self._stop_all(but=ours)
        if ours is not None and self._filled(RAYKV, ours, LOOKUP_MANY_ROWS):
            for number in range(self._rounds + 1):
                self._look_up(RAYKV, ours, number)
        self._stop_all()
        self._say("lookups among very many keys: done")

    def _filled(self, label: str, worker: Worker, rows: int) -> bool:
        try:
            filled = worker.ask("fill", rows=rows, seconds=LOOKUP_FILL_S)["rows"]
        except WorkerError as error:
            self._say(f"lookups, {label}: FAILED: {error}")
            self.results["lookups"].append({"row": label, "error": str(error)})
            return False
        self._say(f"lookups, {label}: {filled:,} keys")
        return True

    def _look_up(self, label: str, worker: Worker, number: int) -> None:
        try:
            measured = worker.ask("look_up", round=number)
        except WorkerError as error:
            self._say(f"lookups, {label}: FAILED: {error}")
            measured = {"error": str(error)}
        if number:
            self.results["lookups"].append({"row": label, "round": number, **measured})

    # -- the mixed run ----------------------------------------------------------------------------------------------

    def _mixed(self) -> None:
        """Measure one store after another, each with a reader and a writer. The stores are full, so they evict."""
        limits = self._start(Spec("limits", "limits"), store_nbytes=0, tag=" mixed")
        assert limits is not None
        limits.ask("store_mixed", face="loader")
        for label, spec in MIXED:
            if self._quick and peer_of(spec) not in {"", *QUICK_MIXED_PEERS}:
                continue
            if peer_of(spec) in {"", *self._peers} and spec.name not in self._missing:
                try:
                    self._mixed_of(label, spec, limits)
                except WorkerError as error:
                    self._say(f"mixed run, {label}: FAILED: {error}")
                    self.results["mixed"].append({"row": label, "error": str(error)})
                self._stop_all(but=limits)
        self._stop_all()

    def _mixed_of(self, label: str, spec: Spec, limits: Worker) -> None:
        seconds, rounds = (0.5, 2) if self._quick else (2.0, self._rounds)
        in_process = spec.module == "lmcache"
        reader = self._start(spec, store_nbytes=MIXED_STORE_NBYTES, tag=" mixed")
        assert reader is not None
        shared = reader.ask("store_mixed", face="")["shared"]
        writer: Worker | None = None
        if not in_process:
            writer = self._start(spec, store_nbytes=MIXED_STORE_NBYTES, tag=" writer", shared=shared)
            assert writer is not None
            writer.ask("load", face="", seconds=MIXED_FILL_S, rate=0)
        for number in range(rounds + 1):
            alone = limits.ask("mixed", face="mapped dict", seconds=seconds, round=number)
            reader.ask("store_mixed", face="")  # puts the evicted objects back
            quiet = reader.ask("mixed", face="", seconds=seconds, round=number)
            for rate in (0, self._write_rate):
                reader.ask("store_mixed", face="")
                load = {"seconds": seconds + 2 * MIXED_MARGIN_S, "rate": rate}
                if writer is None:
                    reader.ask("special", name="write", nbytes=64 * KIB, batch=32, **load)
                else:
                    writer.tell("load", face="", **load)
                read = reader.ask("mixed", face="", seconds=seconds, warm_s=MIXED_MARGIN_S, round=number)
                wrote = reader.ask("special", name="wrote") if writer is None else writer.answer()
                if number:
                    cell = {"row": label, "round": number, "rate": rate, "alone": alone, "quiet": quiet}
                    self.results["mixed"].append({**cell, "read": read, "wrote": wrote})
        if spec.module == "raykv_store":
            reader.ask("store_mixed", face="")  # puts the evicted objects back
            reader.ask("special", name="freeze")
            try:
                self.results["frozen"] = reader.ask("mixed", face="", seconds=seconds, round=0, put_back=False)
            finally:
                reader.ask("special", name="thaw")
        self._say(f"mixed run: {label}")


def main() -> int:
    """Measure, print the tables and the bars, and draw the chart. Returns 1 if a store gave wrong bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds, fewer peers and workloads")
    parser.add_argument("--rounds", type=int, help="rounds that count (default 5, with --quick 3)")
    parser.add_argument("--runs", type=int, default=1, help="whole runs; the bars show the median of them (default 1)")
    parser.add_argument("--peers", help=f"of {','.join(PEERS)} (default all, with --quick {','.join(QUICK_PEERS)})")
    parser.add_argument(
        "--write-rate", type=int, default=2000, help="objects a second of the mixed run's steady writer"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=LAST,
        help="every figure of the last run (default %(default)s); earlier ones get .1, .2",
    )
    parser.add_argument("--chart", type=Path, help="where the chart goes (default: next to the JSON file)")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", help="measure nothing: show JSON files; bars are their medians"
    )
    arguments = parser.parse_args()
    if arguments.sources:
        runs = [json.loads(source.read_text()) for source in arguments.sources]
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # raises SystemExit, so that the clean-up runs
        chosen = (
            arguments.peers.split(",") if arguments.peers is not None else (QUICK_PEERS if arguments.quick else PEERS)
        )
        peers = {name for name in chosen if name}
        if peers - set(PEERS):
            parser.error(f"no such peers: {', '.join(sorted(peers - set(PEERS)))}; there are {', '.join(PEERS)}")
        rounds = arguments.rounds or (3 if arguments.quick else 5)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        runs = []
        for number in range(arguments.runs):
            run = Run(rounds=rounds, peers=peers, quick=arguments.quick, write_rate=arguments.write_rate)
            run.everything()
            runs.append(run.results)
            last = number + 1 == arguments.runs
            path = arguments.json if last else arguments.json.with_suffix(f".{number + 1}.json")
            path.write_text(json.dumps(run.results, indent=1) + "\n")
            print(f"== every figure: {path}")
    print(report.text(runs[-1], bars.median(runs)))
    source = arguments.sources[-1] if arguments.sources else arguments.json
    path = arguments.chart or source.with_suffix(".png")
    problem = environments.draw(source, path)
    print(f"== chart: {problem or path}")
    return int(any(run["wrong"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
