"""The directory of a test's cluster: a process that serves all nodes over TCP."""

import threading
from typing import Any

from raykv.embedded import InProcessMembership
from raykv.membership.proxy import MembershipProxyServer
from raykv.transport.server import SocketServer
from tests.chaos.children import fields_of_child, serve

EXPIRE_S = 0.25


def main() -> None:
    fields = fields_of_child()
    membership = InProcessMembership(member_timeout_s=fields["member_timeout_s"])
    service = MembershipProxyServer(membership, None)
    secret = bytes.fromhex(fields["secret"])
    server = SocketServer(service, fields["address"], secret, io_timeout_s=3.0, max_connections=64)
    server.serve()
    ended = threading.Event()

    def expire() -> None:
        while not ended.wait(EXPIRE_S):
            membership.expire()

    def view() -> dict[str, Any]:
        now = membership.logic.view
        return {"epoch": now.epoch, "members": {each.node_id: each.incarnation for each in now.members}}

    threading.Thread(target=expire, daemon=True).start()
    serve({"view": view})
    ended.set()
    server.close()


if __name__ == "__main__":
    main()
