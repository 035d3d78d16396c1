"""Sends what the nodes and a decode engine must know about ended requests, on one thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import BoundedSemaphore
from typing import Any, Final

from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.hand_off import Notes
from raykv.integrations.vllm.hints import HintSender
from raykv.integrations.vllm.lookups import Lookups
from raykv.integrations.vllm.tracked import Tracked

MAX_WAITING: Final = 1024
"""At most this many messages about ended requests wait to be sent. Further ones are dropped. Then the eviction policies
know less, and predict worse which chunks will be read again."""


class EndedRequests:
    """Sends reports, hints and notes about requests that have ended."""

    def __init__(self, lookups: Lookups, groups: Groups, notes: Notes) -> None:
        self._lookups, self._groups, self._notes = lookups, groups, notes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-report")
        self._places = BoundedSemaphore(MAX_WAITING)
        self._hint_sender = HintSender(lookups.names)

    def close(self) -> None:
        """End the thread. What waits is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def report(self, tracked: Tracked) -> None:
        """Report a finished request to the nodes. After a hand-off only the decode engine reports.

        From the request's number of output tokens, eviction policies predict which chunks will be read again. A failed
        report is dropped.
        """
        request, groups = tracked.request, self._groups
        names = [
            groups.name(group, request.block_hashes, end)
            for group in groups.each
            if group.whole
            for end in groups.ends(group, request.block_hashes, 0, request.num_prompt_tokens)
        ]
        if names and request.num_output_tokens and not tracked.mixed:
            for client in self._lookups.clients(tracked.scope).values():
                self._submit(partial(client.hint, client.keys(names), output_tokens=request.num_output_tokens))

    def send_hints(self, tracked: Tracked) -> None:
        """Send the hints of an ended request to the nodes. Hints that cannot be sent are dropped."""
        if tracked.hints.after_end:
            clients, request = self._lookups.clients(tracked.scope), tracked.request
            prompt = request.num_prompt_tokens // self._groups.hash_tokens
            send = partial(self._hint_sender.send, clients.values(), tracked.hints, tracked.scope, request.block_hashes)
            self._submit(partial(send, prompt))

    def leave_note(self, hand_off: str, tickets: Sequence[dict[str, Any]]) -> None:
        """Tell the decode engine of a hand-off that the prefill engine has ended."""
        self._submit(partial(self._notes.leave, hand_off, tickets))

    def _submit(self, send: Callable[[], object]) -> None:
        if self._places.acquire(blocking=False):
            self._thread.submit(send).add_done_callback(lambda _: self._places.release())
