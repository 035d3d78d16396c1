"""`NodeHandle` starts a supervisor, which runs a node in a child process; see `raykv.supervisor.process`."""

import json
import logging
import secrets
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any, Final

import msgspec

from raykv.config import NodeConfig
from raykv.errors import ConfigError, PeerUnavailable, TransientError
from raykv.membership.membership import MembershipPort
from raykv.membership.proxy import MembershipProxyServer
from raykv.protocol import codec, messages
from raykv.protocol.keyring import SECRET_NBYTES
from raykv.protocol.trace_requests import TracedRequest
from raykv.storage.files import remove_unowned
from raykv.supervisor.process import NodeReport, NodeSpec
from raykv.transport.link import Link
from raykv.transport.server import SocketServer
from raykv.transport.socket_library import environment_with

log = logging.getLogger(__name__)

START_S: Final = 60.0
ANSWER_S: Final = 10.0
RETRY_S: Final = 0.02
STOP_S: Final = 20.0
"""`NodeHandle.stop` gives the node this much time to shut down cleanly. After that, the node is killed."""
PROXY_CONNECTIONS: Final = 64


class NodeHandle:
    """Starts one node under a supervisor, reads the node's counters, and stops the node. Thread-safe.

    If the node ends by itself, the supervisor restarts it. When this process ends, supervisor and node end too.

    Attributes:
        config: The config of the node.
        pid: Process id of the node; 0 before the first start. Each restart changes it.
        starts: Number of times the node was started.
        supervisor: The supervisor's process.
        ended: Whether the supervisor has ended. After that, the node is not restarted.
    """

    def __init__(self, config: NodeConfig, *, secret: bytes, membership: MembershipPort) -> None:
        """Start the node, and wait until it serves. The node reaches the directory through a proxy in this process.

        `secret` is the secret that the cluster began with. The proxy has a secret of its own, which is never rotated.

        Raises:
            ConfigError: The node cannot run with this config on this host. The message says why.
            PeerUnavailable: The supervisor ended, or the node did not start within START_S. Their stderr says why.
        """
        environment = environment_with(config.socket_library)
        self.config = config
        self.pid = self.starts = 0
        self._membership = membership
        self._address = self._problem = ""
        self._reported = threading.Condition()
        self.ended = False
        self._stopping = threading.Lock()
        proxy_secret = secrets.token_bytes(SECRET_NBYTES)
        self._proxy = SocketServer(
            MembershipProxyServer(membership, config.node_id),
            "127.0.0.1:0",
            proxy_secret,
            io_timeout_s=ANSWER_S,
            max_connections=PROXY_CONNECTIONS,
        )
        self._proxy.serve()
        try:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "raykv.supervisor.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment,
                process_group=0,  # Ctrl-C must reach only this process, which then stops the node
            )
        except OSError:
            self._proxy.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="raykv-supervised", daemon=True)
        self._listener.start()
        try:
            fields = config.model_dump(mode="json")
            spec = NodeSpec(fields, secret.hex(), self._proxy.address, proxy_secret.hex())
            self._send(msgspec.json.encode(spec))
            with self._reported:
                self._reported.wait_for(lambda: self.starts or self._problem or self.ended, START_S)
            if self._problem:
                raise ConfigError(self._problem)
            if not self.starts:
                raise PeerUnavailable("the node's process does not start; its stderr says why")
        except BaseException:
            self._end()
            raise

    def stats(self) -> dict[str, Any]:
        """Return the node's stats. Waits during a restart. Raises PeerUnavailable if the node does not answer."""
        found: dict[str, Any] = json.loads(codec.expect(messages.Stats, self._ask(messages.GetStats())).stats)
        return found

    def record_trace(self, on: bool) -> list[TracedRequest]:
        """Fetch the requests that the node recorded since the last call, and turn recording on or off.

        Raises PeerUnavailable if the node does not answer.
        """
        return codec.expect(messages.Trace, self._ask(messages.FetchTrace(on))).requests

    def drain(self, nbytes_per_s: float) -> None:
        """Have the node move its chunks to other nodes. `stats` shows the progress, under "drain".

        Raises PeerUnavailable if the node does not answer.
        """
        codec.expect(messages.Done, self._ask(messages.Drain(nbytes_per_s)))

    def stop(self, *, unlink: bool = False) -> None:
        """Stop the node and the supervisor. With `unlink`, also leave the cluster and remove the node's memory.

        Can be called more than once.
        """
        with self._stopping:
            if not self.ended:
                self._send(b"stop")
                try:
                    self.supervisor.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    log.warning("node %s does not stop in order; it is killed", self.config.node_id)
            self._end()
            if not unlink:
                return
            try:
                self._membership.leave(self.config.node_id)
            except TransientError:
                pass  # the directory removes the node when its heartbeats stop
            if self.config.file_prefix is not None:
                remove_unowned(self.config.file_prefix)

    def _end(self) -> None:
        """End the supervisor and its node, the listener thread and the proxy server."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()  # at the end of stdin the supervisor kills the node and ends
        try:
            self.supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()  # then the kernel kills the node too
            self.supervisor.wait()
        self._listener.join(STOP_S)
        self._proxy.close()

    def _send(self, line: bytes) -> None:
        assert self.supervisor.stdin is not None
        try:
            self.supervisor.stdin.write(line + b"\n")
        except BrokenPipeError:
            pass  # the supervisor has ended; see `ended`

    def _listen(self) -> None:
        assert self.supervisor.stdout is not None
        try:
            with self.supervisor.stdout as lines:
                for line in lines:
                    report = msgspec.json.decode(line, type=NodeReport)
                    with self._reported:
                        self._problem = report.problem
                        if not report.problem:
                            self.pid, self._address = report.pid, report.address
                            self.starts += 1
                        self._reported.notify_all()
        finally:
            with self._reported:
                self.ended = True
                self._reported.notify_all()

    def _ask(self, request: messages.Message) -> messages.Answer:
        """Send a request to the node, and return its answer. While the node restarts, retry for up to ANSWER_S."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            try:
                with closing(Link.connect(self._address, b"", deadline_s=deadline_s)) as link:
                    return link.call(request, deadline_s=deadline_s)
            except TransientError as error:
                if self.ended or time.monotonic() + RETRY_S >= deadline_s:
                    raise PeerUnavailable(f"the node does not answer: {self._problem or error}") from error
                time.sleep(RETRY_S)
