"""Weight epochs: an engine never reuses KV of weights that it no longer has.

An epoch is a text that replaces the revision in the namespaces of all ranks. The `Scope` of each load and save contains
the epoch. At first the epoch is empty, and the namespaces keep the revision with which the engine started.

1. `reset_cache` begins a private epoch with a random text. This engine finds nothing that was stored before, and other
   engines find nothing that this engine stores.
2. `state_revision` ends a private epoch. Engines that state the same revision share chunks again.
3. After a private epoch has ended, each worker drops the chunks that it stored during the epoch.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger

from raykv.errors import RayKVError, UsageError
from raykv.types import host_identity

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.epochs")

DROP_TIMEOUT_S: Final = 1.0
"""An attempt to drop an epoch waits at most this long for earlier commits, and then at most this long for the nodes."""
RETRY_S: Final = 10.0
MAX_PENDING_DROPS: Final = 64
"""At most this many namespaces of ended epochs wait for a node to answer. Beyond that, the chunks of the oldest
namespace are left to eviction."""
_PRIVATE: Final = "private:"


def is_private(epoch: str) -> bool:
    """Return whether only one engine uses this epoch."""
    return epoch.startswith(_PRIVATE)


def stated(revision: str) -> str:
    """Make a namespace's revision from the text that a user stated."""
    return f"stated:{revision}"


@dataclass(frozen=True, slots=True)
class Statement:
    """A call of `state_revision` in one worker.

    Attributes:
        revision: Text that identifies the new weights.
        host: The worker's host. Clocks of different hosts cannot be compared.
        at_ns: Time of the call on the monotonic clock of the worker's host.
    """

    revision: str
    host: str
    at_ns: int

    @classmethod
    def now(cls, revision: object) -> "Statement":
        """Make a statement with this host and the present time.

        Raises:
            UsageError: The revision is not a text, or is empty.
        """
        if not isinstance(revision, str) or not revision:
            raise UsageError(f"field 'revision': {revision!r} is not a text that identifies the weights")
        return cls(revision, host_identity(), time.monotonic_ns())


class Epochs:
    """The epochs of one engine, on the scheduler's side.

    Attributes:
        current: Epoch of all new loads and saves. Empty: they use the revision with which the engine started.
    """

    def __init__(self) -> None:
        self.current = ""
        self._host, self._reset_ns = host_identity(), 0

    def reset(self) -> None:
        """Begin a private epoch."""
        self.current, self._reset_ns = _PRIVATE + secrets.token_hex(16), time.monotonic_ns()
        logger.info("raykv: a reset began a private epoch; state_revision() makes new KV shareable again")

    def accept(self, statements: Sequence[Statement]) -> bool:
        """End the private epoch if a statement is newer than the last reset. Return whether the epoch has changed.

        A statement arrives only with the output of a later step. If a reset happened between the statement and its
        arrival, the statement is ignored, because it describes the old weights.
        """
        here = [each for each in statements if each.host == self._host]
        if statements and not here:
            logger.warning("raykv: state_revision() has no effect: no worker runs on the scheduler's host")
        latest = max(here, key=lambda each: each.at_ns, default=None)
        if latest is None or stated(latest.revision) == self.current:
            return False
        if latest.at_ns <= self._reset_ns:
            logger.warning("raykv: revision %r was stated before the last reset, and is ignored", latest.revision)
            return False
        if not is_private(self.current):
            logger.warning("raykv: revision %r is ignored: reset the caches before you state it", latest.revision)
            return False
        self.current = stated(latest.revision)
        logger.info("raykv: the weights have revision %r", latest.revision)
        return True


class EpochDropper:
    """Drops the chunks of ended private epochs on a thread, for one worker."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-drop")
        self._closed = threading.Event()
        self._pending: dict[bytes, Client] = {}

    def drop(self, client: "Client") -> None:
        """Drop the chunks of all salts and adapters in this client's namespace.

        The namespace belongs to an epoch that has ended, so nothing new is stored in it. This call returns at once. If
        no node answers, the drop is tried again every RETRY_S seconds.
        """
        self._pending[client.namespace.digest] = client
        if len(self._pending) > MAX_PENDING_DROPS:
            self._pending.pop(next(iter(self._pending)), None)
        self._thread.submit(self._drop_pending)

    def _drop_pending(self) -> None:
        while self._pending:
            digest, client = next(iter(self._pending.items()))
            try:
                if (writer := client.router.writer) is not None:
                    writer.drain(time.monotonic() + DROP_TIMEOUT_S)  # a commit after the drop would store chunks again
                client.drop_namespace(timeout_s=DROP_TIMEOUT_S)
                self._pending.pop(digest, None)
            except RayKVError as error:
                logger.warning("raykv: KV of old weights is not freed yet (%s)", error)
                if self._closed.wait(RETRY_S):
                    self._pending.clear()

    def close(self) -> None:
        """Drop the waiting namespaces, but give up after the first failure. Then eviction frees the other chunks."""
        self._closed.set()
        self._thread.shutdown()
