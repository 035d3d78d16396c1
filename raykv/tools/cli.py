"""The command line. `doctor` and `plan` work without Ray. So do `why` and `namespace`, if a node's address is given."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from raykv.config import GIB, ClusterConfig
from raykv.config.base import parse_nbytes
from raykv.errors import ConfigError, RayKVError
from raykv.eviction import POLICIES
from raykv.planner.command import add_arguments, plan_command
from raykv.protocol.keyring import Stage
from raykv.tools.commands import add_commands, node_address, status_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 for success. 1 for a failure (the reason is on stderr), or if `doctor` finds something wrong. For a wrong
        command line, argparse exits with 2.
    """
    options = parser().parse_args(arguments)
    try:
        if options.here is not None:
            return int(options.here(options) or 0)
        print(options.run(options) if node_address(options) is not None else _with_ray(options))
    except RayKVError as error:
        print(f"raykv: {error}", file=sys.stderr)
        return 1
    return 0


def _with_ray(options: argparse.Namespace) -> str:
    try:
        import ray

        ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
    except ModuleNotFoundError:
        raise ConfigError("Ray is not installed; pip install 'raykv[ray]'") from None
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster at {options.address!r} ({error}); start one with 'ray start'") from error
    try:
        return str(options.run(options))
    finally:
        ray.shutdown()


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="raykv", description="A distributed KV cache for LLM inference, on Ray.")
    whole.set_defaults(here=None)
    whole.add_argument("--address", default="auto", help="the Ray cluster, as for ray.init (default: the one here)")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="put a node on every Ray node, now and whenever one joins")
    up.add_argument("--arena", metavar="SIZE", help="shared memory of each node: '64 GiB', or '80%%' of its /dev/shm")
    up.add_argument(
        "--policy", help=f"eviction policy: {', '.join(POLICIES)}, or 'module:attribute' (default: leaf_lru)"
    )
    up.add_argument("--ssd", metavar="DIR", action="append", help="a directory on a drive; may be repeated")
    up.add_argument("--ssd-size", metavar="SIZE", help="what may be used of each of these drives, such as '1 TiB'")
    up.add_argument("--config", metavar="FILE", help="JSON file with the fields of ClusterConfig")
    up.add_argument("--separate-hosts", action="store_true", help="no shared memory between Ray nodes of one machine")
    up.set_defaults(run=_up)

    status = commands.add_parser("status", help="what runs, and what it holds")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    status.add_argument("--secret", action="store_true", help="only the secret, for clients that connect by host:port")
    status.set_defaults(run=_status)

    upgrade = commands.add_parser("upgrade", help="restart node after node with the code installed now; memory stays")
    upgrade.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each node (default: 60)")
    upgrade.set_defaults(run=_upgrade)

    drain = commands.add_parser("drain", help="move a node's chunks to other nodes, then end the node")
    drain.add_argument("node", metavar="NODE", help="id of its Ray node, or the first characters, as in 'raykv status'")
    drain.add_argument("--rate", default="500 MiB", metavar="SIZE", help="bytes a second at most (default: 500 MiB)")
    drain.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="how long to wait (default: 3600)"
    )
    drain.add_argument("--undo", action="store_true", help="start a drained node again, empty")
    drain.set_defaults(run=_drain)

    record = commands.add_parser("record", help="capture a trace of requests, for 'raykv plan'")
    record.add_argument("file", metavar="FILE", help="a line a request; must not exist")
    record.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600; Ctrl-C ends it)")
    record.set_defaults(run=_record)

    rotate = _add_rotate(commands)

    down = commands.add_parser("down", help="end all nodes and free their memory")
    down.set_defaults(run=_down)

    _add_doctor(commands)

    plan = commands.add_parser(
        "plan", help="what a cache of a given size and policy would save on a trace; needs no Ray"
    )
    add_arguments(plan)
    plan.set_defaults(here=lambda options: print(plan_command(options)))
    asking = add_commands(commands)
    for command in (up, status, upgrade, drain, record, rotate, down, *asking):
        command.add_argument("--name", default="default", help="name of the raykv cluster")
    return whole


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what this host grants raykv, and how to get more; needs no Ray")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument(
        "--record-sys", metavar="FILE", help="write what /sys says of NICs and GPUs, for bug reports; must not exist"
    )
    doctor.set_defaults(here=_doctor)


def _add_rotate(commands: Any) -> argparse.ArgumentParser:
    secret = commands.add_parser("secret", help="the cluster's secret")
    actions = secret.add_subparsers(required=True, metavar="ACTION")
    rotate: argparse.ArgumentParser = actions.add_parser("rotate", help="replace it by a new one, without interruption")
    rotate.add_argument(
        "--keep-former", action="store_true", help="accept the former one too, until 'raykv secret rotate' runs again"
    )
    rotate.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each step (default: 60)")
    rotate.set_defaults(run=_rotate_secret)
    return rotate


def _up(options: argparse.Namespace) -> str:
    from raykv.cluster import start

    fields: dict[str, Any] = {}
    if options.config:
        try:
            with open(options.config, encoding="utf-8") as file:
                fields = json.load(file)
        except (OSError, ValueError) as error:
            raise RayKVError(f"--config {options.config}: {error}") from error
    fields.setdefault("name", options.name)
    storage = dict(fields.get("storage", {}))
    if options.arena:
        storage.pop("arena_nbytes", None)
        fields.pop("arena_share", None)
        if options.arena.endswith("%"):
            fields["arena_share"] = _share(options.arena)
        else:
            storage["arena_nbytes"] = options.arena
    if options.policy:
        storage["policy"] = options.policy
    if options.ssd or options.ssd_size:
        if not (options.ssd and options.ssd_size):
            raise ConfigError("--ssd and --ssd-size belong together: a directory, and how much of its drive to use")
        storage["ssd"] = {"paths": options.ssd, "capacity_nbytes": options.ssd_size}
    if storage:
        fields["storage"] = storage
    if options.separate_hosts:
        fields["separate_hosts"] = True
    return _table(start(ClusterConfig.load(fields)))


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise ConfigError(f"--arena {text!r}: write a share such as '80%', or a size such as '64 GiB'") from None


def _status(options: argparse.Namespace) -> str:
    from raykv.cluster import control

    if options.secret:
        return control.secret(options.name)
    found = control.status(options.name)
    return json.dumps(found, indent=2) if options.json else _table(found)


def _upgrade(options: argparse.Namespace) -> str:
    from raykv.cluster import control

    lines = []
    for step in control.upgrade(options.name, timeout_s=options.timeout):
        chunks = f", {step['recovered']:,} of {step['chunks_before']:,} chunks recovered" if "recovered" in step else ""
        lines.append(
            f"  {step['node'][:16]}  pid {step['pid_before']} -> {step['pid']} in {step['seconds']:.1f} s{chunks}"
        )
    return "\n".join([f"cluster {options.name!r} is upgraded", *lines])


def _rotate_secret(options: argparse.Namespace) -> str:
    from raykv.cluster import control

    stages = list(control.rotate_secret(options.name, keep_former=options.keep_former, timeout_s=options.timeout))
    if not options.keep_former:
        return "the secret is rotated, and the former one is refused; 'raykv status --secret' shows the new one"
    before = "" if stages else " already"
    return (
        f"the new secret is in use{before}, and the former one is still accepted: give clients that connect by "
        "host:port the new one ('raykv status --secret'), then run 'raykv secret rotate'"
    )


def _drain(options: argparse.Namespace) -> str:
    from raykv.cluster import control

    if options.undo:
        control.undrain(options.node, options.name)
        return f"node {options.node} is back"
    try:
        rate = float(str(parse_nbytes(options.rate)))
    except ValueError as error:
        raise ConfigError(f"--rate: {error}") from None
    last: dict[str, Any] = {}
    before = None
    for last in control.drain(options.node, options.name, nbytes_per_s=rate, timeout_s=options.timeout):
        if last["state"] != "done" and last.get("moved") != before:
            before = last.get("moved")
            print(_moved(last), flush=True)
    left = f"; left behind: {last['reason']}" if last["left"] else ""
    return f"node {options.node} is drained: {_moved(last)}{left}"


def _moved(progress: dict[str, Any]) -> str:
    """Format the progress of a drain."""
    return (
        f"{progress.get('moved', 0):,} chunks moved ({progress.get('moved_nbytes', 0) / GIB:.2f} GiB), "
        f"{progress.get('elsewhere', 0):,} were elsewhere already, {progress.get('left', 0):,} left "
        f"({progress.get('left_nbytes', 0) / GIB:.2f} GiB); "
        f"{progress.get('below_memory', 0):,} of all these were below memory"
    )


def _record(options: argparse.Namespace) -> str:
    from raykv.cluster import control

    count = 0
    try:
        with open(options.file, "x", encoding="utf-8") as file:
            try:
                for requests in control.record(options.name, seconds=options.seconds):
                    file.writelines(each.line() + "\n" for each in requests)
                    file.flush()
                    count += len(requests)
            except KeyboardInterrupt:
                pass
    except OSError as error:
        raise RayKVError(f"FILE {options.file}: {error.strerror}") from error
    return f"{count:,} requests in {options.file}"


def _down(options: argparse.Namespace) -> str:
    from raykv.cluster import stop

    stopped = stop(options.name)
    return f"cluster {options.name!r} is down" if stopped else f"no cluster {options.name!r} was running"


def _doctor(options: argparse.Namespace) -> int:
    from raykv.tools import doctor

    if options.record_sys:
        return _record_sys(options.record_sys)
    found = doctor.examine()
    print(json.dumps(list(map(asdict, found)), indent=2) if options.json else doctor.report(found))
    return int(any(finding.grade == "wrong" for finding in found))


def _record_sys(path: str) -> int:
    from raykv.transport.rails.recording import record_sys

    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(record_sys())
    except OSError as error:
        raise RayKVError(f"--record-sys {path}: {error.strerror}") from error
    return 0


def _table(found: dict[str, Any]) -> str:
    """Format the result of `cluster.status` for people."""
    lines = [f"cluster {found['name']!r}, epoch {found['epoch']}, directory pid {found['directory']['pid']}"]
    for ray_node_id, node in found["nodes"].items():
        name = ray_node_id[:16]
        if "drain" in node and "node_id" not in node:
            lines.append(f"  {name}  drained: {_moved(node['drain'])}")
            continue
        if "error" in node:
            lines.append(f"  {name}  DOWN: {node['error'].splitlines()[0]}")
            continue
        used, total = node["used_nbytes"] / GIB, node["arena_nbytes"] / GIB
        state = "draining" if node.get("drain") else "member" if node["member"] else "joining"
        lines.append(
            f"  {name}  {state:<7}  {node['address']:<21}  {used:.2f} of {total:.2f} GiB in {node['chunks']:,} chunks, "
            f"{node['evicted']:,} evicted"
        )
        if node.get("memory_refused"):
            lines.append(f"  {'':<16}  the arena grows no further: {node['memory_refused']}")
    if found["secret"]["stage"] != Stage.STEADY:
        lines.append("the secret is being rotated: 'raykv secret rotate' goes on with it")
    return "\n".join([*lines, *status_lines(found["nodes"])])


if __name__ == "__main__":
    sys.exit(main())
