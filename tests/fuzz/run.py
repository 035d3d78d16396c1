"""Run fuzz targets, one after another: `python -m tests.fuzz.run --seconds 600 --seed 1 [target ...]`.

With atheris (`pip install 'raykv[fuzz]'`) the inputs follow the coverage of raykv's Python code. What was learned stays
in .cache/fuzz/TARGET/corpus, and an input that shows a bug in .cache/fuzz/TARGET. Without atheris, the runner says so
and mutates the seeds at random.
"""

import argparse
import logging
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

PLACE: Final = Path(".cache/fuzz")
MAX_NBYTES: Final = 1 << 17
INPUT_S: Final = 20
"""An input that takes longer than this is a bug, and so is one that takes more memory than RSS_MIB."""
RSS_MIB: Final = 1536


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together (default: 600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="target", help="default: all")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    guided = find_spec("atheris") is not None
    if options.inside:
        return run_guided(options.targets[0], options.seconds, options.seed)
    from tests.fuzz.base import load_targets

    known = load_targets()
    names = options.targets or sorted(known)
    if unknown := set(names) - set(known):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    if not guided:
        print("atheris is not installed (pip install 'raykv[fuzz]'): the seeds are mutated at random, without coverage")
    seconds = options.seconds / len(names)
    run = start_guided if guided else run_random
    failed = [name for name in names if not run(name, seconds, options.seed)]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} targets, no bug")
    return bool(failed)


def start_guided(name: str, seconds: float, seed: int) -> bool:
    """Fuzz a target in a process of its own, because the fuzzer ends its process. Returns whether it found no bug."""
    command = [sys.executable, "-m", "tests.fuzz.run", "--inside", "--seconds", str(seconds), "--seed", str(seed), name]
    with TemporaryDirectory(prefix="raykv-fuzz-", dir="/dev/shm") as folder:  # the fuzzer ends without atexit
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, errors="replace", check=False, env=environment
        )
    lines = done.stderr.splitlines()
    last = next((line for line in reversed(lines) if " cov: " in line), "no coverage")
    speed = next((line for line in lines if "number_of_executed_units" in line), "")
    print(f"{name}: {speed.rpartition(' ')[2] or '?'} inputs; {last}", flush=True)
    if done.returncode:
        print(*lines[-60:], sep="\n")
    return not done.returncode


def run_guided(name: str, seconds: float, seed: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["raykv"]):
        from tests.fuzz.base import load_targets

        target = load_targets()[name]
    place = PLACE / name
    corpus, seeds = place / "corpus", place / "seeds"
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (seeds / str(number)).write_bytes(data)
    flags = {
        "max_total_time": max(1, int(seconds)),
        "seed": seed,
        "max_len": MAX_NBYTES,
        "timeout": INPUT_S,
        "rss_limit_mb": RSS_MIB,
        "artifact_prefix": f"{place}/",
        "print_final_stats": 1,
    }
    arguments = [sys.argv[0], *(f"-{flag}={value}" for flag, value in flags.items()), str(corpus), str(seeds)]
    atheris.Setup(arguments, target)
    atheris.Fuzz()
    return 0


def run_random(name: str, seconds: float, seed: int) -> bool:
    from tests.fuzz.base import load_targets, mutated

    target, rng, count = load_targets()[name], random.Random(f"{name} {seed}"), 0
    seeds, until_s = list(target.seeds()), time.monotonic() + seconds
    while time.monotonic() < until_s:
        data, count = mutated(rng, seeds), count + 1
        try:
            target(data)
        except Exception:
            PLACE.joinpath(name).mkdir(parents=True, exist_ok=True)
            (PLACE / name / "crash").write_bytes(data)
            logging.disable(logging.NOTSET)
            logging.getLogger("fuzz").exception("%s: the input is in %s", name, PLACE / name / "crash")
            return False
    print(f"{name}: {count} inputs", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
