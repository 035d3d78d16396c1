"""Reports finished requests to the nodes, on a thread of its own: no step of the engine waits for it."""

import queue
import threading
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger

from raykv.errors import RayKVError

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.reporter")

MAX_WAITING: Final = 1024
"""Requests that wait to be reported. Further ones are dropped: eviction decides a little worse."""


class RequestReporter:
    """Reports how many tokens each request produced. Policies learn from it which chunks are read again."""

    def __init__(self) -> None:
        """The thread starts with the first request."""
        self._waiting: queue.Queue[tuple[Client, list[bytes], int] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closing = False

    def report(self, client: "Client", names: list[bytes], output_tokens: int) -> None:
        """Queue a report for the holders of a request's chunks. Never waits, never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="raykv-report", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((client, names, output_tokens))
        except queue.Full:
            logger.debug("dropped the report of a finished request: %d wait already", MAX_WAITING)

    def close(self) -> None:
        """Send what waits while nodes answer, and end. No report may follow."""
        self._closing = True
        if self._thread is not None:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                pass  # the thread is not waiting, and sees `_closing`
            self._thread.join()

    def _work(self) -> None:
        while (report := self._waiting.get()) is not None:
            client, names, output_tokens = report
            try:
                client.hint(client.keys(names), output_tokens=output_tokens)
            except RayKVError as error:
                logger.debug("no node learnt of a request's %d output tokens: %s", output_tokens, error)
                if self._closing:
                    return
            if self._closing and self._waiting.empty():
                return
