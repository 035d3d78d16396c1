"""A node with chunks, or a reader of them, as a process on a host of a `Network`."""

import hashlib
import time
from typing import Any, Final

import raykv
from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.node.node import Node
from raykv.transport import striped_read
from tests.chaos.children import fields_of_child, serve

SPACE: Final = raykv.Namespace(model="m")


def content(number: int, nbytes: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


def hold(secret: str, config: dict[str, Any], count: int, nbytes: int) -> None:
    """Run a node that has the chunks "0", "1", ... until the parent closes the input."""
    membership = InProcessMembership(member_timeout_s=9.0)
    node = Node(NodeConfig.load(config), secret=bytes.fromhex(secret), membership=membership)
    node.start()
    with raykv.connect(SPACE, address=node.member.local_address) as client:
        names = [str(number) for number in range(count)]
        assert client.put(names, [content(n, nbytes) for n in range(count)], chained=False).stored == count
        serve({"address": lambda: node.member.address})
    node.stop(unlink=True)


def read(secret: str, config: dict[str, Any], count: int, nbytes: int, pause_s: float) -> None:
    """Run a client that reads all chunks as often as the parent asks for."""
    striped_read.PAUSE_S = pause_s  # type: ignore[misc]
    names, into = [str(number) for number in range(count)], [bytearray(nbytes) for _ in range(count)]
    contents = [content(number, nbytes) for number in range(count)]
    with raykv.connect(SPACE, secret=secret, **config) as client:

        def read_all(times: int) -> dict[str, Any]:
            """Return what was missing or wrong, the seconds of each read, and the rails."""
            missing, wrong, took_s = 0, 0, []
            for _ in range(times):
                for buffer in into:
                    buffer[:8] = bytes(8)
                began_s = time.monotonic()
                hits = client.get(names, into).hits
                took_s.append(time.monotonic() - began_s)
                missing += hits.count(False)
                wrong += sum(hit and buffer != right for hit, buffer, right in zip(hits, into, contents, strict=True))
            rails = client.stats()["data_paths"]["tcp"].get("rails", {}).get("holder", {})
            return {"missing": missing, "wrong": wrong, "took_s": took_s, "rails": list(rails.values())}

        serve({"read": read_all})


if __name__ == "__main__":
    given = fields_of_child()
    {"holder": hold, "reader": read}[given.pop("name")](**given)
