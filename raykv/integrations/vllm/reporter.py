"""Reports finished requests to the nodes on a separate thread, so that no step of the engine waits."""

from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger

from raykv.errors import RayKVError

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.reporter")

MAX_WAITING: Final = 1024
"""The most reports in the queue. Further reports are dropped, which only makes eviction a little worse."""


class RequestReporter:
    """Reports how many tokens each request produced. Eviction policies predict from it which chunks are read again."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-report")
        self._room = BoundedSemaphore(MAX_WAITING)

    def report(self, client: "Client", names: list[bytes], output_tokens: int) -> None:
        """Queue a report for the nodes that hold a request's chunks. Never waits, never raises."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._send, client, names, output_tokens)

    def close(self) -> None:
        """Finish the report that is being sent, and drop the queued ones. The caller adds no report after this."""
        self._thread.shutdown(cancel_futures=True)

    def _send(self, client: "Client", names: list[bytes], output_tokens: int) -> None:
        try:
            client.hint(client.keys(names), output_tokens=output_tokens)
        except RayKVError as error:
            logger.debug("no node learnt of a request's %d output tokens: %s", output_tokens, error)
        finally:
            self._room.release()
