"""A process that keeps a node alive: `python -m raykv.keeper`, started by `raykv.kept.KeptNode`.

A node that is killed or crashes is back in the time it takes to map its memory. The keeper has imported everything,
which is most of a Python process's start; it has no threads and maps no memory, so each node is a fork of it. The port
that the first one listens on is kept for those after it: peers find the node again without a new view.

    stdin   one line of JSON, the `Order`; later "stop" or "forget", on a line. Its end is the keeper's, and the node's.
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
import threading
import time
from functools import partial
from types import FrameType
from typing import Any, Final

import msgspec

from raykv.config import NodeConfig
from raykv.errors import ConfigError
from raykv.node import Node
from raykv.relay import RelayedDirectory
from raykv.sweep import forget
from raykv.transport.tcp import parse_address

log = logging.getLogger("raykv.keeper")  # this file is run, not imported

REFUSED: Final = 78
"""Exit status of a node, and its keeper, whose config cannot be served here (EX_CONFIG)."""
STEADY_S: Final = 1.0
"""A node that lived so long is made anew at once; one that did not, a little later each time."""
MAX_DELAY_S: Final = 5.0
LOOK_S: Final = 0.5
STOP, FORGET = "stop", "forget"
_PR_SET_PDEATHSIG: Final = 1
_SIGNALS: Final = {STOP: signal.SIGTERM, FORGET: signal.SIGUSR1}


class Order(msgspec.Struct):
    """What to serve.

    Attributes:
        config: Fields of `NodeConfig`.
        secret: The cluster's, as hexadecimal text.
        directory: Address of a `Relay`.
    """

    config: dict[str, Any]
    secret: str
    directory: str


class Word(msgspec.Struct, omit_defaults=True):
    """What became of a node that was made.

    Attributes:
        pid: Its process.
        first_ns: By the monotonic clock, when that process ran its first line.
        problem: Why the config cannot be served here; empty when it is.
    """

    pid: int
    first_ns: int
    problem: str = ""


class Keeper:
    """Makes a node, and another one whenever it ends unasked."""

    def __init__(self, order: Order, words: int) -> None:
        """Args: words: Descriptor that a `Word` of each node is written to."""
        self._order = order
        self._config = NodeConfig.load(order.config)
        self._words = words
        self._port: socket.socket | None = None
        self._orders = b""
        self._asked = ""

    def run(self) -> int:
        """Until somebody asks to stop, or is gone. Returns the exit status."""
        self._keep_port()
        gc.collect()
        gc.freeze()  # or each node's first collection would copy all pages that it shares with us
        delay_s = 0.0
        while True:
            began_s = time.monotonic()
            keeper = os.getpid()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS.values())  # until the node can heed them
            pid = os.fork()
            if not pid:
                self._become_node(keeper)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS.values())
            status = os.waitstatus_to_exitcode(self._watch(pid))
            if self._asked or status == REFUSED:
                break
            log.warning("node %s, process %d, ended by itself (%d); making it anew", self._config.node_id, pid, status)
            if time.monotonic() - began_s >= STEADY_S:
                delay_s = 0.0
            if not self._listen(delay_s):
                break
            delay_s = min(MAX_DELAY_S, max(0.05, 2 * delay_s))
        if self._asked == FORGET and status and self._config.file_prefix is not None:
            forget(self._config.file_prefix)  # the node could not do it
        return status

    def _keep_port(self) -> None:
        """Take a port, if any will do, and hold it without listening: then whoever says so may listen there, too."""
        family, where = parse_address(self._config.bind)
        if not isinstance(where, tuple) or where[1]:
            return
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
                    if not self._read_orders():
                        poll.unregister(0)
                    if self._asked:
                        os.kill(pid, _SIGNALS.get(self._asked, signal.SIGKILL))
        finally:
            os.close(ended)

    def _listen(self, seconds: float) -> bool:
        """Wait so long for orders. False when there was one: there is nothing left to stop."""
        if select.select([0], [], [], seconds)[0]:
            self._read_orders()
        return not self._asked

    def _read_orders(self) -> bool:
        """False when there will be no more: then nobody needs the node any more."""
        raw = os.read(0, 4096)
        self._orders += raw
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            self._asked = line.decode(errors="replace")
        if not raw:
            self._asked = "nobody is there"
        return bool(raw)

    # -- the node's side --------------------------------------------------------------------------------------------

    def _become_node(self, keeper: int) -> None:
        """The rest of this process is a node's. Never returns."""
        first_ns, status = time.monotonic_ns(), 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the keeper be killed
            os.close(0)
            if os.getppid() == keeper:
                status = self._serve(first_ns)
        except BaseException:
            log.critical("node %s ends", self._config.node_id, exc_info=True)
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve(self, first_ns: int) -> int:
        asked = _Asked()
        node: Node | None = None
        problem = ""
        try:
            directory = RelayedDirectory(self._order.directory)
            node = Node(self._config, secret=bytes.fromhex(self._order.secret), directory=directory)
            node.start()
        except ConfigError as error:
            problem = str(error)
        say(self._words, Word(os.getpid(), first_ns, problem))
        if node is None or problem:
            return REFUSED
        while not asked.wait(LOOK_S):
            if node.failure is not None:
                log.critical("the node failed (%r); ending this process", node.failure)
                return 1
        if asked.which == FORGET:
            node.stop(unlink=True)
        else:
            node.stop(leave=False)
        return 0


class _Asked:
    """What a signal asks for."""

    def __init__(self) -> None:
        self.which = ""
        self._event = threading.Event()
        for which, number in _SIGNALS.items():
            signal.signal(number, partial(self._note, which))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS.values())

    def _note(self, which: str, number: int, frame: FrameType | None) -> None:
        self.which = which
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Whether something is asked for by then."""
        return self._event.wait(seconds)


def say(words: int, word: Word) -> None:
    """Write a line."""
    os.write(words, msgspec.json.encode(word) + b"\n")


def main() -> int:
    """Serve the order on stdin."""
    words = os.dup(1)
    os.dup2(2, 1)  # what anybody prints must not come between the words
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    raw = b""
    while not raw.endswith(b"\n"):
        byte = os.read(0, 1)  # what comes behind the line is for later
        if not byte:
            return 0
        raw += byte
    try:
        keeper = Keeper(msgspec.json.decode(raw, type=Order), words)
    except ConfigError as error:
        say(words, Word(os.getpid(), time.monotonic_ns(), str(error)))
        return REFUSED
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
