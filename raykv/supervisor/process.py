"""A process that keeps a node alive: `python -m raykv.supervisor.process`, started by `raykv.supervisor.handle.NodeHandle`.

A node that is killed or crashes is back in the time it takes to map its memory. The keeper has imported everything,
which is most of a Python process's start; it has no threads and maps no memory, so each node is a fork of it. The port
that the first one listens on is kept for those after it: peers find the next one without a new view.

    stdin   one line of JSON, the `Order`; later "stop", on a line. Its end is the keeper's, and the node's, at once.
    stdout  one line of JSON, a `Word`, for each node that is made.
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
from typing import Any, Final

import msgspec

from raykv.config import NodeConfig
from raykv.errors import ConfigError
from raykv.membership.proxy import RelayedDirectory
from raykv.node.node import Node
from raykv.transport.tcp import parse_address

log = logging.getLogger("raykv.supervisor.process")  # this file is run, not imported

REFUSED: Final = 78
"""Exit status of a node, and its keeper, whose config cannot be served here (EX_CONFIG)."""
STEADY_S: Final = 1.0
"""A node that lived so long is made anew at once; one that did not, a little later each time."""
MIN_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 5.0
LOOK_S: Final = 0.5
MAX_ORDER_NBYTES: Final = 1 << 20
STOP: Final = b"stop"
_PR_SET_PDEATHSIG: Final = 1


class Order(msgspec.Struct):
    """What to serve.

    Attributes:
        config: Fields of `NodeConfig`.
        secret: The cluster's, as hexadecimal text.
        directory: Address of a `Relay`, which knows that secret.
    """

    config: dict[str, Any]
    secret: str
    directory: str


class Word(msgspec.Struct, omit_defaults=True):
    """What became of a node that was made.

    Attributes:
        pid: Its process.
        first_ns: By the monotonic clock, when that process ran its first line.
        address: Where processes of this host reach it.
        problem: Why the config cannot be served here; empty when it is.
    """

    pid: int
    first_ns: int
    address: str = ""
    problem: str = ""


class Keeper:
    """Makes a node, and another one whenever it ends unasked."""

    def __init__(self, order: Order, words: int) -> None:
        """Args: words: Descriptor that a `Word` of each node is written to."""
        self._order = order
        self._config = NodeConfig.load(order.config)
        self._words = words
        self._port: socket.socket | None = None
        self._heard = b""
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Until somebody asks to stop, or is gone. Returns the exit status."""
        self._keep_port()
        gc.collect()
        gc.freeze()  # or each node's first collection would copy all pages that it shares with us
        delay_s = 0.0
        while True:
            began_s, keeper = time.monotonic(), os.getpid()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the node looks for it, and nothing interrupts
            pid = os.fork()
            if not pid:
                self._become_node(keeper)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            status = os.waitstatus_to_exitcode(self._watch(pid))
            if self._signal is not None or status == REFUSED:
                return status
            log.warning("node %s, process %d, ended by itself (%d); making it anew", self._config.node_id, pid, status)
            if time.monotonic() - began_s >= STEADY_S:
                delay_s = 0.0
            if not self._rest(delay_s):
                return 0
            delay_s = min(MAX_DELAY_S, max(MIN_DELAY_S, 2 * delay_s))

    def _keep_port(self) -> None:
        """Hold the node's port, a free one if any will do, but do not listen: then the nodes can."""
        family, where = parse_address(self._config.bind)
        self._port = socket.socket(family, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._port.bind(where)
        except OSError:
            return  # the node will say what is wrong
        host = self._config.bind.rpartition(":")[0]
        self._config = self._config.model_copy(update={"bind": f"{host}:{self._port.getsockname()[1]}"})

    # -- the keeper's side ------------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> int:
        """Wait until the node has ended, and pass on what we are told meanwhile. Returns its wait status."""
        ended = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.register(0, select.POLLIN)
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == ended:
                        return os.waitpid(pid, 0)[1]
                    if not self._listen():
                        poll.unregister(0)
                    if self._signal is not None:
                        os.kill(pid, self._signal)
        finally:
            os.close(ended)

    def _rest(self, seconds: float) -> bool:
        """Wait so long before the next node. False when none is wanted any more."""
        if select.select([0], [], [], seconds)[0]:
            self._listen()
        return self._signal is None

    def _listen(self) -> bool:
        """Hear what we are told. False when there will be no more: then nobody needs the node."""
        raw = os.read(0, 4096)
        *lines, self._heard = (self._heard + raw).split(b"\n")
        if STOP in lines:
            self._signal = signal.SIGTERM
        if not raw:
            self._signal = signal.SIGKILL
        return bool(raw)

    # -- the node's side --------------------------------------------------------------------------------------------

    def _become_node(self, keeper: int) -> None:
        """The rest of this process is a node's. Never returns."""
        first_ns, status = time.monotonic_ns(), 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the keeper be killed
            if os.getppid() == keeper:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                status = self._serve(first_ns)
        except BaseException:
            log.critical("node %s ends", self._config.node_id, exc_info=True)
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve(self, first_ns: int) -> int:
        secret = bytes.fromhex(self._order.secret)
        try:
            node = Node(self._config, secret=secret, directory=RelayedDirectory(self._order.directory, secret))
            node.start()
        except ConfigError as error:
            log.error("node %s cannot be served here: %s", self._config.node_id, error)
            say(self._words, Word(os.getpid(), first_ns, problem=str(error)))
            return REFUSED
        say(self._words, Word(os.getpid(), first_ns, node.member.local_address))
        while signal.sigtimedwait({signal.SIGTERM}, LOOK_S) is None:
            if node.failure is not None:
                log.critical("the node failed (%r); ending this process", node.failure)
                return 1
        node.stop(leave=False)
        return 0


def say(words: int, word: Word) -> None:
    """Write a line."""
    os.write(words, msgspec.json.encode(word) + b"\n")


def _read_order() -> bytes:
    """The first line on stdin; what comes behind it is for later."""
    raw = b""
    while not raw.endswith(b"\n") and len(raw) < MAX_ORDER_NBYTES:
        byte = os.read(0, 1)
        if not byte:
            return b""
        raw += byte
    return raw


def main() -> int:
    """Serve the order on stdin."""
    words = os.dup(1)
    os.dup2(2, 1)  # what anybody prints must not come between the words
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # whoever started us may ignore it, and then nobody could be waited for
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    raw = _read_order()
    if not raw:
        return 0
    try:
        keeper = Keeper(msgspec.json.decode(raw, type=Order), words)
    except ConfigError as error:
        say(words, Word(os.getpid(), time.monotonic_ns(), problem=str(error)))
        return REFUSED
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
