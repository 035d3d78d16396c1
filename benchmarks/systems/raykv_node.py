"""Runs a raykv node without Ray. Prints when the process began, when its imports ended, and when it was ready.

Arguments: the node's config as JSON, the cluster's secret, and the address of a `MembershipProxyServer`. Without the
last one, the node is the only member of its cluster.
"""

import time

FIRST_S = time.monotonic()

import json  # noqa: E402  (the time is read before the imports)
import sys  # noqa: E402

from raykv.config import NodeConfig  # noqa: E402
from raykv.embedded import InProcessMembership  # noqa: E402
from raykv.membership.proxy import MembershipProxy  # noqa: E402
from raykv.node.node import Node  # noqa: E402

IMPORTED_S = time.monotonic()


def main() -> None:
    """Serve until standard input ends."""
    config = NodeConfig.load(json.loads(sys.argv[1]))
    secret, alone = bytes.fromhex(sys.argv[2]), InProcessMembership(member_timeout_s=60.0)
    membership = MembershipProxy(sys.argv[3], secret) if len(sys.argv) > 3 else alone
    node = Node(config, secret=secret, membership=membership)
    node.start()
    times = {"first_s": FIRST_S, "imported_s": IMPORTED_S, "ready_s": time.monotonic()}
    print(json.dumps({"address": node.member.address, "table": str(node.store.table.memory.path), **times}), flush=True)
    sys.stdin.read()
    node.stop(unlink=True)


if __name__ == "__main__":
    main()
