"""What nodes are told of requests that are done, on a thread of its own: no step of the engine waits for it."""

import queue
import threading
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from raykv.errors import RayKVError

if TYPE_CHECKING:
    from raykv import Client

# Below vLLM's own logger, so that its handlers and level apply.
logger = init_logger("vllm.raykv.telling")

MAX_WAITING = 1024
"""Requests that nodes were not told of yet. With more, the newest are forgotten: eviction decides a little worse."""


class Teller:
    """Tells nodes how many tokens a request made, from which policies learn which chunks come again."""

    def __init__(self) -> None:
        """The thread begins with the first request."""
        self._waiting: queue.Queue[tuple[Client, list[bytes], int] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._ending = False

    def tell(self, client: "Client", names: list[bytes], output_tokens: int) -> None:
        """Have the holders of a request's chunks told, soon. Never waits, never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="raykv-tell", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((client, names, output_tokens))
        except queue.Full:
            logger.debug("more requests are done than nodes can be told of")

    def close(self) -> None:
        """Tell what waits, as long as nodes answer, and end. None may follow."""
        self._ending = True
        if self._thread is not None:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                pass  # it looks whether more is coming
            self._thread.join()

    def _work(self) -> None:
        while (told := self._waiting.get()) is not None:
            client, names, output_tokens = told
            try:
                client.hint(client.keys(names), output_tokens=output_tokens)
            except RayKVError as error:
                logger.debug("nodes were not told of a request's %d tokens: %s", output_tokens, error)
                if self._ending:
                    return
            if self._ending and self._waiting.empty():
                return
