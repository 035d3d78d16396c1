"""The commands `raykv why` and `raykv namespace`, which connect to a running cluster as clients."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from raykv import connect
from raykv.client.admin import merge_namespaces
from raykv.client.client import Client
from raykv.client.request_trail import TrailLine
from raykv.config import GIB, MIB, ClientConfig
from raykv.errors import RayKVError, UsageError
from raykv.protocol.chunk_keys import KEY_NBYTES, from_bytes
from raykv.protocol.namespace import Namespace

ANY = Namespace(model="-")
"""A placeholder, because every client needs a namespace. No chunks are stored under this namespace."""


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Add `why` and `namespace` to the command line. Return the parsers of `why` and of each action on namespaces."""
    why = commands.add_parser("why", help="where chunks are, or why they are gone; what was done for a request")
    chunks = why.add_mutually_exclusive_group(required=True)
    chunks.add_argument("names", nargs="*", default=[], metavar="NAME", help="names of objects")
    chunks.add_argument("--tokens", metavar="FILE", help="in place of names: a prompt, as a JSON list of token ids")
    chunks.add_argument("--keys", nargs="+", default=[], metavar="HEX", help="in place of names: keys, 32 digits each")
    chunks.add_argument("--request", metavar="ID", help="a request's id, such as the header x-request-id of its answer")
    why.add_argument("--namespace", metavar="NAMESPACE", help="see 'raykv namespace list' (default: the only one)")
    why.set_defaults(run=_why)

    namespace = commands.add_parser("namespace", help="the namespaces in use, and their configs")
    actions = namespace.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all namespaces, their configs and counters")
    listing.set_defaults(run=_list)
    setting = actions.add_parser("set", help="change fields of a config; the others stay")
    setting.add_argument("fields", nargs="+", metavar="FIELD=VALUE", help="as in NamespaceConfig; 'none' resets one")
    setting.set_defaults(run=_set)
    dropping = actions.add_parser("drop", help="drop all chunks of a namespace, on every node and tier, and its config")
    dropping.set_defaults(run=_drop)
    for action in (setting, dropping):
        action.add_argument(
            "--namespace", metavar="NAMESPACE", required=True, help="its model's name, or its fields as JSON"
        )
    made = [why, listing, setting, dropping]
    for command in made:
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--node", metavar="ADDRESS", help="address of any node: 'unix:/path' or 'host:port' (default: found by Ray)"
        )
    return made


def node_address(options: argparse.Namespace) -> str | None:
    """Return the node's address from --node or RAYKV_ADDRESS. None means that the command must use Ray."""
    if not hasattr(options, "node"):
        return None
    return ClientConfig.from_environment(address=options.node).address


def _client(options: argparse.Namespace) -> Client:
    address = node_address(options)
    if address is None:
        from raykv.cluster import find_address

        address = find_address(options.name)
    return connect(ANY, address=address)


def _why(options: argparse.Namespace) -> str:
    with _client(options) as client:
        if options.request is not None:
            return _trail(client.trail(options.request), as_json=options.json)
        if options.keys:
            found, what = client.why(from_bytes(b"".join(map(_key, options.keys)))), options.keys
        else:
            client = client.using(_choose(client, options.namespace))
            if options.names:
                found, what = client.why(options.names), options.names
            else:
                tokens, size = _tokens(options.tokens), client.namespace.chunk_tokens
                found = client.why(tokens=tokens)
                what = [f"tokens {place * size}..{(place + 1) * size - 1}" for place in range(len(found))]
    answers = list(zip(what, found, strict=True))
    if options.json:
        return json.dumps([{"chunk": name, **asdict(why), "text": why.text} for name, why in answers], indent=2)
    return "\n".join(f"{name}: {why.text}" for name, why in answers)


def _trail(lines: list[TrailLine], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([asdict(each) for each in lines], indent=2)
    if not lines:
        raise UsageError("--request: no node knows this request; each keeps the last sentences of routers and engines")
    shown = []
    for each in lines:
        when = datetime.fromtimestamp(each.at_s, UTC).astimezone().strftime("%F %T.%f")[:-3]
        shown.append(f"{when}  {each.text}")
        if each.absent is not None:
            shown.append(f"{'':25}the first chunk that was not found: {each.absent.text}, before that")
    return "\n".join(shown)


def _list(options: argparse.Namespace) -> str:
    with _client(options) as client:
        found = client.namespaces()
    if options.json:
        return json.dumps(found, indent=2, default=lambda value: value.model_dump(mode="json", exclude_defaults=True))
    return "\n".join(namespace_lines(found)) or "no namespace is in use"


def _set(options: argparse.Namespace) -> str:
    fields = dict(map(_field, options.fields))
    with _client(options) as client:
        client = client.using(_choose(client, options.namespace, new=True))
        count = client.configure(**fields)
        return f"{_name(client.namespace)}: {count} nodes have applied it"


def _drop(options: argparse.Namespace) -> str:
    with _client(options) as client:
        client = client.using(_choose(client, options.namespace))
        return f"{_name(client.namespace)}: {client.drop_namespace():,} chunks dropped"


def namespace_lines(found: list[dict[str, Any]]) -> list[str]:
    """Format the result of `Client.namespaces` for people."""
    lines = []
    for each in found:
        config = each["config"].model_dump(mode="json", exclude_defaults=True)
        used, size = each["used_nbytes"], (GIB, "GiB") if each["used_nbytes"] >= GIB else (MIB, "MiB")
        lines.append(
            f"  {_name(each['namespace'])}: {each['chunks']:,} chunks in {used / size[0]:.2f} {size[1]}, "
            f"{each['reads']:,} reads{_counts('misses', each['misses'])}{_counts('gone', each['departures'])}"
        )
        if config:
            lines.append("    " + ", ".join(f"{name}={value}" for name, value in config.items()))
        for name in ("get", "put"):
            times = each[f"{name}_times"]
            if times["count"]:
                lines.append(
                    f"    {name} of several chunks: half within {times['p50_us']:,.0f} us, "
                    f"99 % within {times['p99_us']:,.0f} us"
                )
    return lines


def status_lines(nodes: Mapping[str, Any]) -> list[str]:
    """Return readable lines about the namespaces in the stats of nodes."""
    lines = namespace_lines(merge_namespaces(nodes))
    return ["namespaces:", *lines] if lines else []


def _counts(what: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    parts = [f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda each: -each[1])]
    return f", {sum(counts.values()):,} {what} ({', '.join(parts)})"


def _name(namespace: Namespace) -> str:
    """Format a namespace for people: its model, and all other fields that differ from the default."""
    fields = namespace.model_dump(mode="json", exclude_defaults=True)
    model = str(fields.pop("model"))
    return model + (f" ({', '.join(f'{name}={value}' for name, value in fields.items())})" if fields else "")


def _choose(client: Client, text: str | None, *, new: bool = False) -> Namespace:
    """Find a namespace. `text`: its fields as JSON, or its model's name; None for the only one in use.

    With `new`, the error message also explains how to name a namespace that is not in use yet.
    """
    if text is not None and text.startswith("{"):
        try:
            return Namespace.load(json.loads(text))
        except ValueError as error:
            raise UsageError(f"--namespace: {error}") from error
    known: list[Namespace] = [each["namespace"] for each in client.namespaces()]
    found = [each for each in known if text is None or each.model == text]
    if len(found) == 1:
        return found[0]
    hint = "none is in use" if not known else "those in use: " + "; ".join(map(_name, known))
    if not found and new:
        hint += ". A new one must be given by its fields as JSON: '{\"model\": ...}'"
    which = f"{len(found)} are called {text!r}" if text is not None else f"there are {len(found)}"
    raise UsageError(f"--namespace: {which}; {hint}")


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r}: write FIELD=VALUE, such as ttl_s=3600 or policy=lfu")
    if value.lower() in ("none", "null", ""):
        return name, None
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _key(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != KEY_NBYTES:
        raise UsageError(f"--keys {text!r}: a key is {2 * KEY_NBYTES} hexadecimal digits")
    return raw


def _tokens(path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        tokens = np.array(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RayKVError(f"--tokens {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise UsageError(f"--tokens {path}: not a JSON list of token ids")
    return tokens
