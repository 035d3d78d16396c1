"""The owner of a node on one host: it runs the node under a supervisor, as the node actor does in Ray.

If the supervisor ends, the owner ends too. The test then starts another owner, as Ray would.
"""

import os
import threading
import time
from typing import Any

from raykv.config import NodeConfig
from raykv.membership.proxy import MembershipProxy
from raykv.supervisor.handle import NodeHandle
from tests.chaos.children import fields_of_child, serve

CALL_S = 3.0
"""How long a call to the directory may take, as in `raykv.cluster.actors`."""
WATCH_S = 0.1


def main() -> None:
    fields = fields_of_child()
    secret = bytes.fromhex(fields["secret"])
    membership = MembershipProxy(fields["directory"], secret, answer_s=CALL_S)
    node = NodeHandle(NodeConfig.load(fields["config"]), secret=secret, membership=membership)
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.is_set():
            if node.ended:
                os._exit(1)
            time.sleep(WATCH_S)

    def stop(unlink: bool) -> bool:
        stopping.set()
        node.stop(unlink=unlink)
        return True

    def drain(nbytes_per_s: float) -> bool:
        node.drain(nbytes_per_s)
        return True

    def pids() -> dict[str, Any]:
        return {"node": node.pid, "supervisor": node.supervisor.pid, "owner": os.getpid(), "starts": node.starts}

    threading.Thread(target=watch, daemon=True).start()
    serve({"stats": node.stats, "pids": pids, "drain": drain, "stop": stop})
    stop(unlink=False)


if __name__ == "__main__":
    main()
