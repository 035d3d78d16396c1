"""A node in a process of its own that is made anew when it ends: the handle of whoever owns it. See `raykv.supervisor.process`."""

import json
import logging
import subprocess
import sys
import threading
import time
from typing import Any, Final

import msgspec

from raykv.config import NodeConfig, environment_of_child
from raykv.errors import ConfigError, PeerUnavailable, TransientError
from raykv.membership.membership import DirectoryPort
from raykv.membership.proxy import Relay
from raykv.protocol import messages
from raykv.protocol.trace_requests import TracedRequest, unpack
from raykv.storage.orphans import forget_unowned
from raykv.supervisor.process import STOP, Order, Word
from raykv.transport.tcp import SocketLink, SocketServer

log = logging.getLogger(__name__)

START_S: Final = 60.0
ASK_S: Final = 10.0
RETRY_S: Final = 0.02
STOP_S: Final = 20.0
"""How long a node may take to stop in order. Then it is killed, and its memory stays as it is."""
RELAY_CONNECTIONS: Final = 64


class NodeHandle:
    """One node. Thread-safe.

    Attributes:
        config: As given.
        pid: Process of the node, 0 before there is one; another one after each of its deaths.
        first_ns: When that process ran its first line, by the monotonic clock.
        starts: How often a node was made.
    """

    def __init__(self, config: NodeConfig, *, secret: bytes, directory: DirectoryPort) -> None:
        """Start it, and wait until it serves.

        Args:
            secret: The cluster's secret.
            directory: Asked by this process for the node.

        Raises:
            ConfigError: It cannot be served here; says why.
            PeerUnavailable: Its process ended, or does not answer within START_S; what it wrote to stderr says why.
        """
        self.config = config
        self.pid = self.first_ns = self.starts = 0
        self._directory = directory
        self._address = self._problem = ""
        self._news = threading.Condition()
        self._ended = False
        self._stopping = threading.Lock()
        self._relay = SocketServer(
            Relay(directory, config.node_id),
            "127.0.0.1:0",
            secret,
            io_timeout_s=ASK_S,
            max_connections=RELAY_CONNECTIONS,
        )
        self._relay.serve()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "raykv.supervisor.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment_of_child(),
                process_group=0,  # who interrupts this process from its terminal leaves the end of the node to it
            )
        except OSError:
            self._relay.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="raykv-kept", daemon=True)
        self._listener.start()
        try:
            self._say(msgspec.json.encode(Order(config.model_dump(mode="json"), secret.hex(), self._relay.address)))
            with self._news:
                self._news.wait_for(lambda: self.starts or self._problem or self._ended, START_S)
            if self._problem:
                raise ConfigError(self._problem)
            if not self.starts:
                raise PeerUnavailable("the node's process does not come up; what it wrote to stderr says why")
        except BaseException:
            self._end()
            raise

    @property
    def ended(self) -> bool:
        """Whether nobody keeps the node any more."""
        return self._ended

    def stats(self) -> dict[str, Any]:
        """See `Node.stats`. Waits for a node that is being made anew.

        Raises:
            PeerUnavailable: It does not answer.
        """
        found: dict[str, Any] = json.loads(messages.expect(messages.Stats, self._ask(messages.GetStats())).stats)
        return found

    def record(self, on: bool) -> tuple[list[TracedRequest], int]:
        """See `Node.record`.

        Raises:
            PeerUnavailable: It does not answer.
        """
        requests: list[TracedRequest] = []
        left_out, more = 0, True
        while more:
            told = messages.expect(messages.Recorded, self._ask(messages.TakeRecord(on)))
            requests += unpack(told.requests)
            left_out, more = left_out + told.left_out, told.more
        return requests, left_out

    def stop(self, *, unlink: bool = False) -> None:
        """Stop serving, for good. Safe to call again.

        Args:
            unlink: Also leave the cluster, and forget the memory. Else it is there for the process that comes next.
        """
        with self._stopping:
            if not self._ended:
                self._say(STOP)
                try:
                    self._keeper.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    log.warning("node %s does not stop in order; it is killed", self.config.node_id)
            self._end()
            if not unlink:
                return
            try:
                self._directory.leave(self.config.node_id)
            except TransientError:
                pass  # it will notice the silence
            if self.config.file_prefix is not None:
                forget_unowned(self.config.file_prefix)

    def _end(self) -> None:
        """No process of ours is left after it, and no thread."""
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.close()  # its sign to kill the node, and go
        except BrokenPipeError:
            pass
        try:
            self._keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the node goes with it
            self._keeper.wait()
        self._listener.join(STOP_S)
        self._relay.close()

    def _say(self, line: bytes) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(line + b"\n")
            self._keeper.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone, as `ended` tells

    def _listen(self) -> None:
        assert self._keeper.stdout is not None
        try:
            with self._keeper.stdout as lines:
                for line in lines:
                    self._note(msgspec.json.decode(line, type=Word))
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _note(self, word: Word) -> None:
        with self._news:
            self._problem = word.problem
            if not word.problem:
                self.pid, self.first_ns, self._address = word.pid, word.first_ns, word.address
                self.starts += 1
            self._news.notify_all()

    def _ask(self, request: messages.Message) -> messages.Answer:
        link = self._connect(time.monotonic() + ASK_S)
        try:
            return link.call(request, deadline_s=time.monotonic() + ASK_S)
        except TransientError as error:
            raise PeerUnavailable(f"the node does not answer: {error}") from error
        finally:
            link.close()

    def _connect(self, deadline_s: float) -> SocketLink:
        """Connect to the node, or the next one."""
        while True:
            try:
                return SocketLink.connect(self._address, b"", deadline_s=deadline_s)
            except TransientError as error:
                if self._ended or time.monotonic() + RETRY_S >= deadline_s:
                    raise PeerUnavailable(f"the node does not answer: {self._problem or error}") from error
                time.sleep(RETRY_S)
