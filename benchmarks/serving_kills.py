"""Kills one process after another while a system has its load: a worker, a raykv node, and the directory.

For each: failed requests, and how much was reused of requests that began at least 5 s after the kill.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from benchmarks.serving_load import Load, Outcome, reusable_by_request

BACK_S: Final = 5.0
AFTER_ANSWERS: Final = 0.4
"""The process is killed when this share of the requests has been answered."""
RESTART_S: Final = 180.0


def workers() -> list[int]:
    """Return the process ids of all workers of Ray Serve, oldest first."""
    import psutil

    children = psutil.Process().children(recursive=True)
    found = [each for each in children if "ServeReplica" in (line := " ".join(each.cmdline())) and "LLMServer" in line]
    return [each.pid for each in sorted(found, key=lambda each: each.create_time())]


def worker(_pool: str) -> int:
    """Return the process id of a worker that answers requests."""
    return workers()[0]


def node(pool: str) -> int:
    """Return the process id of a raykv node."""
    from raykv import cluster

    return next(each["pid"] for each in cluster.status(pool)["nodes"].values() if each.get("member"))


def directory(pool: str) -> int:
    """Return the process id of the directory's actor."""
    from raykv import cluster

    pid: int = cluster.status(pool)["directory"]["pid"]
    return pid


VICTIMS: Final[dict[str, Callable[[str], int]]] = {"worker": worker, "node": node, "directory": directory}


def play(drive: Callable[[Callable[[int], None]], Outcome], load: Load, victim: str, pool: str) -> dict[str, Any]:
    """Kill a process under the load, and wait until it has been started again.

    Args:
        drive: Plays the load, and calls its argument with the number of answers after each answer.
        victim: One of VICTIMS.
        pool: Name of the raykv cluster.

    Returns:
        The figures.
    """
    pid, count_of_workers, killed_s = VICTIMS[victim](pool), len(workers()), 0.0
    with ThreadPoolExecutor(1) as watch:
        back: Future[float] | None = None

        def on_answer(count: int) -> None:
            nonlocal killed_s, back
            if count >= AFTER_ANSWERS * load.requests and back is None:
                killed_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                back = watch.submit(_wait_for_another, victim, pool, pid, count_of_workers)

        outcome = drive(on_answer)
        if back is None:
            raise RuntimeError(f"too few answers to kill the {victim}: {outcome.failed}")
        again_s = back.result() - killed_s
    ideal = zip(outcome.asked, reusable_by_request(outcome.asked), strict=True)
    after = [(each.cached, best) for each, best in ideal if each.began_s >= killed_s + BACK_S]
    return {
        "victim": victim,
        "requests": load.requests,
        "failed": outcome.failed,
        "begun_later": len(after),
        "reuse_later": sum(cached for cached, _ in after) / max(1, sum(best for _, best in after)),
        "longest_ttft_s": max(each.ttft_s for each in outcome.asked),
        "started_again_s": again_s,
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| killed | requests | failed | begun {BACK_S:.0f} s later | reused of ideal | longest TTFT, s | back, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        cells = [each["victim"], each["requests"], len(each["failed"]), each["begun_later"]]
        cells += [f"{each['reuse_later']:.1%}", f"{each['longest_ttft_s']:.2f}", f"{each['started_again_s']:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _wait_for_another(victim: str, pool: str, old: int, count: int) -> float:
    until_s = time.monotonic() + RESTART_S
    while time.monotonic() < until_s:
        try:
            if _is_back(victim, pool, old, count):
                return time.monotonic()
        except Exception:  # noqa: BLE001 - any error means that it is not back yet
            pass
        time.sleep(0.1)
    raise TimeoutError(f"the {victim} has not been started again after {RESTART_S:.0f} s")


def _is_back(victim: str, pool: str, old: int, count: int) -> bool:
    """Whether another process has taken the place of `old`. `count`: of workers, before."""
    if victim != "worker":
        return VICTIMS[victim](pool) != old
    from ray import serve

    apps = serve.status().applications.values()
    states = [state for app in apps for each in app.deployments.values() for state in each.replica_states.items()]
    now = workers()  # Ray Serve starts a process only after it has noticed that the old one has died
    return old not in now and len(now) >= count and all(name == "RUNNING" for name, number in states if number)
