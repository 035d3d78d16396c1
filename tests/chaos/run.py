"""Run rounds of faults, and print what happened: `python -m tests.chaos.run --seed 7 --rounds 100`."""

import argparse
import sys
import time
from itertools import islice

from tests.chaos.cluster import Cluster
from tests.chaos.hosts import missing
from tests.chaos.rounds import LONGEST_S, Rounds, plan

HOSTS = ["h1", "h2", "h3", "h4"]


def run(seed: int, rounds: int, *, longest_s: float = LONGEST_S) -> Rounds:
    """Run `rounds` rounds of the plan of `seed`. Prints each, the sums, and how to run them again."""
    print(f"replay: python -m tests.chaos.run --seed {seed} --rounds {rounds} --longest {longest_s}", flush=True)
    cluster, began_s = Cluster(HOSTS, seed=seed), time.monotonic()
    done = Rounds(cluster, lambda line: print(line, flush=True))
    try:
        cluster.start()
        cluster.converge(30.0)
        cluster.start_load()
        for number, event in enumerate(islice(plan(seed, HOSTS, longest_s=longest_s), rounds), start=1):
            done.run(number, event)
    finally:
        cluster.close()
    print(f"seed {seed}, {time.monotonic() - began_s:.0f} s: {done.summary()}", flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds that a fault lasts at most")
    given = parser.parse_args()
    if reason := missing():
        print(f"cannot run: {reason}")
        return 2
    done = run(given.seed, given.rounds, longest_s=given.longest)
    print(*done.failures, sep="\n")
    return bool(done.failures)


if __name__ == "__main__":
    sys.exit(main())
