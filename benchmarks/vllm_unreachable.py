"""Measures the vLLM connector's hooks while the node that holds the chunks becomes unreachable.

Run by hand, as root: `python -m benchmarks.vllm_unreachable`

A cluster has two nodes. The far node is in a network namespace, behind a link of limited rate. One engine stores
prompts on the far node, and gives the expected answers. An engine on the near node gets the same prompts, several at
once, and finds their KV on the far node.

In each round the far node disappears at one of four moments: before the lookup, between lookup and load, during the
load, or before the engine hands a loaded prompt over to a decode engine. It disappears in one of three ways. It loses
its address, so that it receives nothing and answers nothing. Or it is stopped with SIGSTOP. Or it is killed.

The output has a line for each way and moment: the outcomes of requests and loads, the longest call of a hook on the
engine's thread, and the longest wait in a hook (time off the CPU). The last line tells how late a process that only
sleeps wakes up.
"""

import argparse
import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, Final

from benchmarks.load_or_compute import VOCABULARY, Link, run
from benchmarks.system import die_with_parent
from benchmarks.vllm_hooks import BAR_STOPPED_S, Hooks  # sets the environment that vLLM reads

from vllm import LLM, SamplingParams  # isort: skip
from vllm.distributed.kv_transfer import get_kv_transfer_group  # isort: skip

from deployments.model import ensure_model
from raykv import Client
from raykv.embedded import InProcessMembership
from raykv.membership.proxy import MembershipProxyServer
from raykv.transport.server import SocketServer

NODE: Final = Path(__file__).parent / "systems" / "raykv_node.py"
HAND_OFF: Final = "before a hand-off"
PHASES: Final = ("before the lookup", "between lookup and load", "during the load", HAND_OFF)
BREAKER_S: Final = 2.5
"""If a node has not answered, the client calls it again after this time."""
LOAD_TIMEOUT_S: Final = 2.0
ANSWER_TOKENS: Final = 8
SLEEPER: Final = """
import json, select, sys, time

late = []
ended = False
while not ended:
    began_s = time.perf_counter()
    ended = bool(select.select([sys.stdin], [], [], 0.002)[0])
    late.append(time.perf_counter() - began_s - 0.002)
late.sort()
print(json.dumps([late[len(late) * 99 // 100], late[-2]]))
"""
"""Code of a process that sleeps 2 ms at a time, like an idle step of the engine, and prints how late it wakes up."""


class Far:
    """The far node, and the ways in which it disappears.

    Attributes:
        store_address: Address of the far node for an engine on the same host.
    """

    def __init__(self, link: Link, directory: InProcessMembership, secret: str, home: Path) -> None:
        self._link, self._directory, self._secret, self._home = link, directory, secret, home
        self.store_address = f"unix:{home}/raykv-owners-far.sock"
        # This shell in the namespace runs the commands at once. A new process would first need time to start.
        shell = ["ip", "netns", "exec", link.space, "sh"]
        self._shell = subprocess.Popen(shell, stdin=subprocess.PIPE, text=True, preexec_fn=die_with_parent)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the node in the namespace."""
        served = SocketServer(
            MembershipProxyServer(self._directory, "far"),
            f"{near_address(self._link)}:0",
            bytes.fromhex(self._secret),
            io_timeout_s=10.0,
            max_connections=64,
        )
        served.serve()
        try:
            within = ["ip", "netns", "exec", self._link.space]
            fields = {"bind": f"{self._link.address}:0", "host": "far"}
            with node_process("far", self._home, self._secret, served.address, within, **fields) as self._process:
                yield
        finally:
            served.close()
            assert self._shell.stdin is not None
            self._shell.stdin.close()
            self._shell.wait()

    def disappear(self, way: str) -> None:
        if way == "no address":
            self._ip("del")
        else:
            self._process.send_signal(signal.SIGSTOP if way == "stopped" else signal.SIGKILL)

    def appear(self, way: str) -> None:
        if way == "no address":
            self._ip("add")
        elif way == "stopped":
            self._process.send_signal(signal.SIGCONT)
        time.sleep(BREAKER_S)

    def _ip(self, verb: str) -> None:
        assert self._shell.stdin is not None
        device = f"{self._link.space}f"
        self._shell.stdin.write(f"ip addr {verb} {self._link.address}/24 dev {device}\n")
        self._shell.stdin.flush()


def near_address(link: Link) -> str:
    """Return the address of the near end of the link."""
    return link.address[:-1] + "1"


def fix_neighbour(link: Link) -> None:
    """Make the far end's hardware address permanent, so that calls do not fail at once when the far end is gone."""
    command = ["ip", "-n", link.space, "-json", "link", "show", "dev", f"{link.space}f"]
    ((device,),) = [json.loads(subprocess.check_output(command))]
    run(
        "ip", "neigh", "replace", link.address, "lladdr", device["address"], "dev", f"{link.space}n", "nud", "permanent"
    )


@contextmanager
def node_process(
    name: str, home: Path, secret: str, directory: str, within: list[str], **fields: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a node. `within` is a command that runs the node in a network namespace; empty for this namespace."""
    storage = {"arena_nbytes": "3 GiB", "shm_dir": str(home)}
    config = json.dumps({"node_id": name, "cluster": "owners", "storage": storage, **fields})
    command = [*within, sys.executable, "-P", str(NODE), config, secret, directory]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the node did not start")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def sleeper() -> Iterator[None]:
    """Print how late a process that only sleeps wakes up. On a busy machine, a hook that waits is as late."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent) as process:
        yield
        usual_s, longest_s = json.loads(process.communicate("\n")[0])
        text = f"late by {usual_s * 1e3:.2f} ms at the 99th percentile, and by {longest_s * 1e3:.2f} ms at most"
        print(f"meanwhile a process that sleeps 2 ms at a time woke up {text}")


@dataclass
class Tally:
    """What happened in the rounds in which the far node disappeared in one way at one moment."""

    rounds: int = 0
    failed: int = 0
    differ: int = 0
    longest: tuple[float, str] = (0.0, "")
    waited: tuple[float, str] = (0.0, "")
    waits: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    longest_round_s: float = 0.0

    def add_hooks(self, hooks: Hooks) -> None:
        for name, (longest_s, waited_s) in hooks.longest_s.items():
            self.longest = max(self.longest, (longest_s, name))
            self.waited = max(self.waited, (waited_s, name))
        self.waits += sum(hooks.waits.values())


class Loads:
    """Makes the far node disappear when a load starts, or some time later. Wraps `Client.get` to notice the start."""

    def __init__(self) -> None:
        self._due: tuple[Far, str, float] | None = None
        get = Client.get

        def watched(client: Client, *arguments: Any, **options: Any) -> Any:
            due, self._due = self._due, None
            if due is not None:
                far, way, after_s = due
                if after_s:
                    Timer(after_s, far.disappear, [way]).start()
                else:
                    far.disappear(way)
                    time.sleep(0.01)
            return get(client, *arguments, **options)

        setattr(Client, "get", watched)  # noqa: B010 - type checkers refuse to assign to a method

    def disappear_at_next(self, far: Far, way: str, after_s: float) -> None:
        self._due = far, way, after_s

    @property
    def is_due(self) -> bool:
        return self._due is not None


def make_engine(address: str, options: argparse.Namespace) -> LLM:
    return LLM(
        str(ensure_model()),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=options.tokens + 64,
        max_num_batched_tokens=512,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=512 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "RayKVConnector",
            "kv_connector_module_path": "raykv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "address": address,
                "load_policy": "always",
                "load_timeout_s": LOAD_TIMEOUT_S,
            },
        },
    )


def answer(engine: LLM, prompts: list[list[int]], *, hand_off: bool = False) -> list[list[int]]:
    """Send all prompts at once. Returns the tokens of each answer; a failed request has none."""
    llm, ended = engine.llm_engine, {}
    extra = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}} if hand_off else None
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, extra_args=extra
    )
    for number, tokens in enumerate(prompts):
        llm.add_request(str(number), {"prompt_token_ids": tokens}, params)
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                ended[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [ended.get(number, []) for number in range(len(prompts))]


def counted_loads(engine: LLM) -> Counter[str]:
    metrics = [metric for metric in engine.get_metrics() if metric.name == "vllm:raykv_loads"]
    return Counter({metric.labels["outcome"]: int(metric.value) for metric in metrics})


class Rounds:
    """Sends prompts to the near engine while the far node, which holds their KV, disappears."""

    def __init__(self, engine: LLM, far: Far, hooks: Hooks, stored: list[tuple[list[int], list[int]]]) -> None:
        self._engine, self._far, self._hooks, self._stored = engine, far, hooks, stored
        self._rng, self._loads = random.Random(2), Loads()

    def run(self, tally: Tally, way: str, phase: str, at_once: int) -> None:
        """Run one round, and wait until the far node answers again."""
        some, self._stored[:at_once] = self._stored[:at_once], []
        prompts, expected = [prompt for prompt, _ in some], [answer for _, answer in some]
        before = counted_loads(self._engine)
        if phase == "between lookup and load":
            self._loads.disappear_at_next(self._far, way, 0.0)
        elif phase == "during the load":
            self._loads.disappear_at_next(self._far, way, self._rng.uniform(0.01, 0.12))
        elif way:
            if phase == HAND_OFF:
                answer(self._engine, prompts)  # to load the prefixes from the far node
            self._far.disappear(way)
            time.sleep(self._rng.uniform(0.0, 0.05))
        self._hooks.reset()
        began_s = time.monotonic()
        got = answer(self._engine, prompts, hand_off=phase == HAND_OFF)
        tally.longest_round_s = max(tally.longest_round_s, time.monotonic() - began_s)
        tally.add_hooks(self._hooks)
        tally.rounds += 1
        tally.failed += got.count([])
        tally.differ += sum(one not in ([], other) for one, other in zip(got, expected, strict=True))
        tally.loads += counted_loads(self._engine) - before
        assert not self._loads.is_due, "nothing was loaded, so the far node did not disappear"
        for saving in get_kv_transfer_group().worker_side.saving:
            saving.future.result()
        if way:
            self._far.appear(way)


def store(far: Far, count: int, options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Store prompts at the far node. Returns the prompts with their answers."""
    rng = random.Random(1)
    prompts = [rng.choices(VOCABULARY, k=options.tokens) for _ in range(count)]
    engine = make_engine(far.store_address, options)
    try:
        answers = []
        for prompt in prompts:
            answers += answer(engine, [prompt])
            for saving in get_kv_transfer_group().worker_side.saving:
                saving.future.result()
        return list(zip(prompts, answers, strict=True))
    finally:
        engine.llm_engine.engine_core.shutdown()


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way and moment")
    parser.add_argument("--at-once", type=int, default=2, help="requests in a round")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--rate", type=int, default=1000, help="of the link, Mbit/s")
    options = parser.parse_args()
    kinds = [("", "reachable")] + [(way, phase) for way in ("no address", "stopped") for phase in PHASES]
    plan = [kind for kind in kinds for _ in range(options.rounds)] + [("killed", "during the load")]
    secret = secrets.token_hex(32)
    hooks, directory = Hooks(), InProcessMembership(member_timeout_s=600.0)
    hooks.watch()
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        link = stack.enter_context(Link())
        link.limit(options.rate)
        far = Far(link, directory, secret, home)
        fix_neighbour(link)
        stack.enter_context(far.running())
        stored = store(far, len(plan) * options.at_once, options)
        near = near_node(stack, link, directory, secret, home)
        engine = make_engine(near, options)
        stack.callback(engine.llm_engine.engine_core.shutdown)
        rounds, tallies = Rounds(engine, far, hooks, stored), {kind: Tally() for kind in plan}
        with sleeper():
            for way, phase in plan:
                rounds.run(tallies[way, phase], way, phase, options.at_once)
                print(".", end="", flush=True)
            print()
            show(tallies)


def near_node(stack: ExitStack, link: Link, directory: InProcessMembership, secret: str, home: Path) -> str:
    """Start the near node on this host, and wait until both nodes know each other. Returns the near node's address."""
    served = SocketServer(
        MembershipProxyServer(directory, "near"),
        "127.0.0.1:0",
        bytes.fromhex(secret),
        io_timeout_s=10.0,
        max_connections=64,
    )
    served.serve()
    stack.callback(served.close)
    fields = {"bind": f"{near_address(link)}:0", "host": "near"}
    stack.enter_context(node_process("near", home, secret, served.address, [], **fields))
    time.sleep(5.0)  # until both nodes have the new view, and the far node has announced its chunks
    return f"unix:{home}/raykv-owners-near.sock"


def show(tallies: dict[tuple[str, str], Tally]) -> None:
    """Print one line for each way and moment."""
    print(f"{'far node':11} {'moment':24} rounds failed differ  longest hook, ms (which)   longest wait   waits  loads")
    for (way, phase), tally in tallies.items():
        longest, waited = f"{tally.longest[0] * 1e3:8.2f} {tally.longest[1]}", f"{tally.waited[0] * 1e3:.2f}"
        print(
            f"{way or 'there':11} {phase:24} {tally.rounds:6} {tally.failed:6} {tally.differ:6} {longest:38} "
            f"{waited:>6} {tally.waits:4}  {dict(tally.loads)}, longest round {tally.longest_round_s:.1f} s"
        )
    longest_s = max(tally.waited[0] for tally in tallies.values())
    print(f"longest wait in a hook {longest_s * 1e3:.2f} ms, bar {BAR_STOPPED_S * 1e3:.0f} ms")
    failed = sum(tally.failed for tally in tallies.values())
    differ = sum(tally.differ for tally in tallies.values())
    print(f"requests failed: {failed}; answers identical: {'no' if differ else 'yes'}")


if __name__ == "__main__":
    main()
