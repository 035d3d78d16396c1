"""The supervisor: a process that runs one node and restarts it. `raykv.supervisor.handle` starts this module.

Each node is a fork of the supervisor, which has imported all modules already. So a restart takes little more than the
time to map the node's memory. Forking is safe, because the supervisor has no threads and maps no shared memory. The
supervisor also reserves the node's port, so peers reach a restarted node at the same address.

The owner is the process with the `NodeHandle`. Two pipes connect the owner to the supervisor:

    stdin   The first line is the `NodeSpec` as JSON. Any later byte stops the node. The end of stdin kills the node.
    stdout  The supervisor writes one line of JSON, a `NodeReport`, for each start of the node.
"""

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from raykv.config import NodeConfig, rdma_devices
from raykv.errors import ConfigError
from raykv.membership.proxy import MembershipProxy
from raykv.node.node import Node
from raykv.transport import rdma

log = logging.getLogger("raykv.supervisor.process")  # not __name__, which is "__main__" in this process

CONFIG_STATUS: Final = 78
"""Exit status of a node and its supervisor if the node cannot run with its config on this host. Equal to EX_CONFIG of
sysexits.h."""
STEADY_S: Final = 1.0
"""A node that ran for at least this long is restarted at once. After a shorter run, the restart is delayed. The delay
grows with each short run."""
MIN_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 5.0
CHECK_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1


class NodeSpec(msgspec.Struct):
    """What the supervisor needs to run a node.

    Attributes:
        config: Fields of the node's NodeConfig.
        secret: The secret that the cluster began with, as hexadecimal text.
        membership: Address of the `MembershipProxyServer`.
        proxy_secret: The secret of the `MembershipProxyServer`, as hexadecimal text.
    """

    config: dict[str, Any]
    secret: str
    membership: str
    proxy_secret: str


class NodeReport(msgspec.Struct, omit_defaults=True):
    """The result of one start of the node.

    Attributes:
        pid: Process id of the node.
        address: The node's address for processes of this host.
        problem: Why the node cannot run with its config on this host; empty if the node runs.
    """

    pid: int
    address: str = ""
    problem: str = ""


class Supervisor:
    """Starts a node, and restarts it whenever it ends by itself."""

    def __init__(self, spec: NodeSpec, reports: int) -> None:
        self._spec = spec
        self._config = NodeConfig.load(spec.config)
        self._reports = reports
        self._port = socket.socket()
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run until the owner stops the node or closes stdin, or a node refuses its config. Return the exit status."""
        self._hold_port()
        self._import_ahead()
        gc.collect()
        gc.freeze()  # otherwise garbage collection in a node would copy the pages shared with the supervisor
        delay_s = 0.0
        while True:
            began_s, supervisor = time.monotonic(), os.getpid()
            # The node inherits the mask: SIGTERM stays pending until `_serve` waits for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            pid = os.fork()
            if not pid:
                self._become_node(supervisor)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            status = os.waitstatus_to_exitcode(self._watch(pid))
            if self._signal is not None or status == CONFIG_STATUS:
                return status
            log.warning("node %s, process %d, ended by itself (%d); restarting", self._config.node_id, pid, status)
            if time.monotonic() - began_s >= STEADY_S:
                delay_s = 0.0
            if self._stopped_within(delay_s):
                return 0
            delay_s = min(MAX_DELAY_S, max(MIN_DELAY_S, 2 * delay_s))

    def _hold_port(self) -> None:
        """Bind the node's port without listening, so that each fork can listen on it. Port 0 means any free port."""
        host, _, port = self._config.bind.rpartition(":")
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._port.bind((host, int(port)))
        except (OSError, OverflowError):
            return  # the node will report the error
        self._config = self._config.model_copy(update={"bind": f"{host}:{self._port.getsockname()[1]}"})

    def _import_ahead(self) -> None:
        """Import pyverbs, if the node will use it. If this fails, it fails again in the node, which reports it."""
        devices = rdma_devices(self._config.rdma, tls=self._config.tls is not None)
        if devices is not None and not rdma.missing():
            with suppress(ImportError):
                from raykv.transport.rdma import exports, path  # noqa: F401

    # -- the supervisor's side ---------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> int:
        """Wait until the node has ended, and send the node the signals from `_receive`. Return the wait status."""
        ended = os.pidfd_open(pid)
        try:
            while ended not in select.select([ended, 0], [], [])[0]:
                os.kill(pid, self._receive())
                if self._signal == signal.SIGKILL:
                    break  # stdin has ended, so `select` would return at once
            return os.waitpid(pid, 0)[1]
        finally:
            os.close(ended)

    def _stopped_within(self, seconds: float) -> bool:
        if select.select([0], [], [], seconds)[0]:
            self._receive()
        return self._signal is not None

    def _receive(self) -> signal.Signals:
        """Read from stdin. Return the signal for the node: SIGTERM for a byte, SIGKILL for the end of stdin."""
        self._signal = signal.SIGTERM if os.read(0, 4096) else signal.SIGKILL
        return self._signal

    # -- the node's side ---------------------------------------------------------------------------------------------

    def _become_node(self, supervisor: int) -> None:
        """Run the node in this forked process. Never returns."""
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # kill this node when the supervisor ends
            if os.getppid() == supervisor:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                status = self._serve()
        except BaseException:
            log.critical("node %s ends", self._config.node_id, exc_info=True)
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve(self) -> int:
        spec = self._spec
        membership = MembershipProxy(spec.membership, bytes.fromhex(spec.proxy_secret))
        try:
            node = Node(self._config, secret=bytes.fromhex(spec.secret), membership=membership)
            node.start()
        except ConfigError as error:
            log.error("node %s cannot be served here: %s", self._config.node_id, error)
            _report(self._reports, NodeReport(os.getpid(), problem=str(error)))
            return CONFIG_STATUS
        _report(self._reports, NodeReport(os.getpid(), node.member.local_address))
        while not _has_sigterm():
            if node.failure is not None:
                log.critical("the node failed (%r); ending this process", node.failure)
                return 1
        node.stop(leave=False)
        return 0


def _has_sigterm() -> bool:
    """Wait for SIGTERM, up to CHECK_S. Returns whether SIGTERM was sent.

    If the process is stopped (SIGSTOP) during the wait and continues only after CHECK_S, `sigtimedwait` returns a
    signal that was never sent. So the number of the signal is checked.
    """
    found = signal.sigtimedwait({signal.SIGTERM}, CHECK_S)
    return found is not None and found.si_signo == signal.SIGTERM


def _report(reports: int, report: NodeReport) -> None:
    os.write(reports, msgspec.json.encode(report) + b"\n")


def main() -> int:
    reports = os.dup(1)
    os.dup2(2, 1)  # printed text goes to stderr, because stdout is for the reports
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would make waitpid fail
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    # The buffer takes nothing but this line, because the owner sends more only after the first report.
    spec = sys.stdin.buffer.readline()
    return Supervisor(msgspec.json.decode(spec, type=NodeSpec), reports).run()


if __name__ == "__main__":
    sys.exit(main())
