"""Lookups: which chunks of a request are stored, and on which nodes.

A lookup first reads the shared memory of this host. If chunks are missing there, a thread asks their owners: the nodes
that know the holders. For a request with a hand-off ticket, no owner is asked, because the ticket names the holders.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from raykv.errors import NamespaceMismatch
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.groups import NO_HIT, Group, Groups, Hashes, Hit
from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.protocol.namespace import Namespace
from raykv.protocol.ticket import Ticket
from raykv.types import Holder, NodeId

if TYPE_CHECKING:
    from raykv import Client

LOOKUP_THREADS: Final = 4
MAX_HASHES_AT_ONCE: Final = 1024
"""At most this many hashes are looked up on the engine's thread. This takes about 1 ms."""
HAND_OFF_WAIT_S: Final = 0.003
"""A hand-off waits at most this long for its lookups, and for the nodes to commit the last chunks of a prompt. The
decode engine looks up the chunks that a ticket does not name."""
COMMIT_POLL_S: Final = 0.0005
"""While `tickets` waits, it looks into this host's memory at this interval."""

Place: TypeAlias = tuple[Group, int]
"""A chunk of a request: its group, and the token before which it ends."""
Held: TypeAlias = dict[tuple[int, int], Holder]
"""The holders of a request's chunks for one rank, by index of the group and end of the chunk."""


class Prompt(NamedTuple):
    """The tokens to look up.

    Attributes:
        hashes: The engine's hashes of the tokens.
        computed: Number of leading tokens that the engine has already.
        limit: A hit has at most this many tokens.
    """

    hashes: Hashes
    computed: int
    limit: int


class Found(NamedTuple):
    """The result of a lookup: the longest hit, and for each rank the holders of the chunks that were found.

    Attributes:
        is_expected: Whether a prefill engine still computes some of the chunks. Their holders are a prediction.
    """

    hit: Hit
    held: dict[Rank, Held]
    is_expected: bool = False


NOTHING: Final = Found(NO_HIT, {})


def hand_off_deadline() -> float:
    """Return until when a hand-off that begins now may wait, on the monotonic clock."""
    return time.monotonic() + HAND_OFF_WAIT_S


class _Everything:
    def __contains__(self, end: object) -> bool:
        return True


class Lookups:
    """Looks up chunks for the scheduler's side of one engine."""

    def __init__(
        self, config: ConnectorConfig, groups: Groups, connection: Connection, namespaces: Mapping[Rank, Namespace]
    ) -> None:
        """Start the threads. `namespaces` has one entry for each set of ranks that store the same bytes."""
        self._config, self._groups, self._connection = config, groups, connection
        self._namespaces = dict(sorted(namespaces.items()))
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="raykv-lookup")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def clients(self, scope: Scope) -> dict[Rank, "Client"]:
        """Return one client for each namespace; empty while no node is connected."""
        found = {rank: self._connection.client(namespace, scope) for rank, namespace in self._namespaces.items()}
        return {rank: client for rank, client in found.items() if client is not None}

    def begin(self, scope: Scope, prompt: Prompt, *, record: bool) -> Future[Found]:
        """Begin a lookup. If this host's memory has the longest possible hit, the returned future is done already.

        A prompt with more than MAX_HASHES_AT_ONCE hashes is always looked up on a thread.

        Args:
            record: Add the request to the trace while `raykv record` runs.
        """
        clients, here = self.clients(scope), NOTHING
        if clients:
            if len(prompt.hashes) > MAX_HASHES_AT_ONCE:
                return self._threads.submit(self._ask, clients, prompt, record=record)
            here = self._search(clients, prompt, lambda client, names, _: client.locate(names, timeout_s=0.0))
            if not self.is_longest(here, prompt):
                return self._threads.submit(self._ask, clients, prompt, record=record)
            if record and any(client.router.is_recording for client in clients.values()):
                self._threads.submit(self._record, clients, prompt)  # on a thread, because it calls the node
        done = Future[Found]()
        done.set_result(here)
        return done

    def is_longest(self, found: Found, prompt: Prompt) -> bool:
        """Return whether the hit is as long as it would be if all chunks were stored."""
        return found.hit.tokens >= self._longest_possible(prompt).tokens

    def has_first(self, scope: Scope, prompt: Prompt) -> bool:
        """Return whether the first chunk that the engine lacks is stored for every rank. Asks the chunk's owner.

        The result is False for an engine that cannot use a part of a prefix, because one chunk is of no use to it.
        """
        if not self._groups.is_plain:
            return False
        (group,) = self._groups.each
        ends = self._groups.ends(group, prompt.hashes, prompt.computed, prompt.computed + group.chunk_tokens)
        names = [self._groups.name(group, prompt.hashes, end) for end in ends[:1]]
        timeout_s = self._config.lookup_timeout_s
        return all(client.locate(names, timeout_s=timeout_s) != [None] for client in self.clients(scope).values())

    def ask(self, scope: Scope, prompt: Prompt) -> Found:
        """Look up chunks on all nodes within `lookup_timeout_s`."""
        return self._ask(self.clients(scope), prompt, record=True)

    def expected(self, found: Found, prompt: Prompt) -> Found:
        """Extend a hit to all chunks of the prompt. Each further chunk is expected where the last found chunk is."""
        hit = self._longest_possible(prompt)
        if found.hit.tokens >= hit.tokens:
            return found
        ((index, ends),), held = hit.ends.items(), {}
        for rank, known in found.held.items():
            last = known[index, max(end for _, end in known)]
            held[rank] = {(index, end): known.get((index, end), last) for end in ends}
        return Found(hit, held, is_expected=True)

    def redeem(self, scope: Scope, prompt: Prompt, tickets: Any) -> Found:
        """Read the holders of the chunks from the prefill engine's tickets, one for each namespace.

        Args:
            tickets: Unchecked input from an HTTP request.

        Raises:
            RayKVError: A ticket is not valid, or belongs to another namespace. If the engines store under different
                numbers of tensor ranks, the error names the remedy.
        """
        clients = self.clients(scope)
        if not isinstance(tickets, list) or not tickets or not clients:
            return NOTHING
        _check_ranks(Ticket.from_json(tickets[0]), next(iter(clients.values())).namespace)
        if len(tickets) != len(clients):
            return NOTHING
        places = self.places(prompt.hashes, 0, prompt.limit + 1)
        held = {}
        for (rank, client), fields in zip(clients.items(), tickets, strict=True):
            names = [self._groups.name(group, prompt.hashes, end) for group, end in places]
            held[rank] = _held(places, client.locate(names, ticket=Ticket.from_json(fields)))
        return self._found(prompt, held)

    def tickets(
        self, scope: Scope, hashes: Hashes, tokens: int, *, found: Sequence[Found], computed: int, deadline_s: float
    ) -> list[dict[str, Any]]:
        """Make the tickets for a prompt of this many tokens, one for each namespace.

        Waits until the deadline, or until the chunks that the engine has computed are committed. Chunks of workers on
        this host appear in this host's memory. Chunks of workers on other hosts do not, so a thread asks their owners.

        Args:
            found: The results of earlier lookups for this prompt. They name the holders of chunks on other nodes.
            computed: Number of leading tokens that the engine found in its own cache or loaded. It computed the others.
            deadline_s: See `hand_off_deadline`.
        """
        clients, prompt = self.clients(scope), Prompt(hashes, 0, tokens - 1)
        if not clients:
            return []
        places = self.places(hashes, 0, tokens)
        names = [self._groups.name(group, hashes, end) for group, end in places]

        def look(timeout_s: float) -> dict[Rank, Held]:
            return {rank: _held(places, client.locate(names, timeout_s=timeout_s)) for rank, client in clients.items()}

        held = _merged(clients, [*(one.held for one in found), look(0.0)])
        expected = [(group.index, end) for group, end in places if end > computed]
        asking: Future[dict[Rank, Held]] | None = None
        while self._longest(prompt, held) != self._longest(prompt, held, expected) and time.monotonic() < deadline_s:
            asking = asking or self._threads.submit(look, self._config.lookup_timeout_s)
            wait([asking], COMMIT_POLL_S)
            held = _merged(clients, [held, look(0.0)])
            if asking.done():
                held, asking = held if asking.exception() else _merged(clients, [asking.result(), held]), None
        return [
            Ticket.of(client.namespace, [_node_of(held[rank], group, end) for group, end in places]).to_json()
            for rank, client in clients.items()
        ]

    def names(self, hashes: Hashes) -> list[bytes]:
        """Return the names of all chunks of a request that may be stored."""
        places = self.places(hashes, 0, len(hashes) * self._groups.hash_tokens)
        return [self._groups.name(group, hashes, end) for group, end in places]

    def places(self, hashes: Hashes, start: int, stop: int, *, is_rest: bool = False) -> list[Place]:
        """Return the chunks that may be stored between these tokens.

        Args:
            is_rest: Whether the groups that need whole prefixes were looked up before. If so, their chunks up to `stop`
                are left out, and the chunks after `stop` in which a hit may end are added.
        """
        groups, places = self._groups, []
        for group in groups.each:
            after = stop + group.chunk_tokens if is_rest else stop
            if groups.has_fine_hits:
                ends = groups.fine_ends(hashes, stop if is_rest and group.whole else start, after)
            elif is_rest and group.whole:
                continue
            else:
                ends = groups.ends(group, hashes, start, after)
            places += [(group, end) for end in ends]
        return places

    # -- inside -----------------------------------------------------------------------------------------------------

    def _record(self, clients: Mapping[Rank, "Client"], prompt: Prompt) -> None:
        """Add to the trace a request whose chunks were all found in this host's memory."""
        client = next(iter(clients.values()))
        group = self._groups.each[0]
        ends = self._groups.ends(group, prompt.hashes, prompt.computed, prompt.limit)
        client.match([self._groups.name(group, prompt.hashes, end) for end in ends], timeout_s=0.0)

    def _ask(self, clients: Mapping[Rank, "Client"], prompt: Prompt, *, record: bool) -> Found:
        """Look up chunks on all nodes within `lookup_timeout_s`."""
        deadline_s = time.monotonic() + self._config.lookup_timeout_s
        first = next(iter(clients.values()))
        recorded = not record

        def ask(client: "Client", names: list[bytes], whole: bool) -> Sequence[Holder | None]:
            nonlocal recorded
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return [None] * len(names)
            if not whole:
                return client.locate(names, timeout_s=left_s, promote=True)
            is_new = not recorded and client is first  # the trace has each request once, for the first rank
            recorded = recorded or is_new
            found = client.match(names, timeout_s=left_s, promote=True, record=is_new)
            low = set(found.low)
            return [Holder(node_id, place in low) for place, node_id in enumerate(found.holders)]

        return self._search(clients, prompt, ask)

    def _search(
        self,
        clients: Mapping[Rank, "Client"],
        prompt: Prompt,
        ask: "Callable[[Client, list[bytes], bool], Sequence[Holder | None]]",
    ) -> Found:
        """First look up the groups that need whole prefixes. Then look up the other groups within the found prefix.

        Args:
            ask: Returns the holders of the named chunks. If its last argument is True, only the chunks before the first
                missing chunk count, so the result may end at the missing chunk.
        """
        groups, hashes = self._groups, prompt.hashes
        held: dict[Rank, Held] = {rank: {} for rank in clients}
        reach = len(hashes) * groups.hash_tokens
        for group in groups.each:
            if not group.whole:
                continue
            ends = groups.ends(group, hashes, prompt.computed, reach)
            for rank, client in clients.items():
                holders = ask(client, [groups.name(group, hashes, end) for end in ends], True) if ends else ()
                named = list(takewhile(bool, holders))
                held[rank].update(_held([(group, end) for end in ends], named))
                ends = ends[: len(named)]
            reach = ends[-1] if ends else prompt.computed
        places = self.places(hashes, prompt.computed, reach, is_rest=True)
        if places:
            names = [groups.name(group, hashes, end) for group, end in places]
            for rank, client in clients.items():
                held[rank].update(_held(places, ask(client, names, False)))
        return self._found(prompt, held)

    def _found(self, prompt: Prompt, held: dict[Rank, Held]) -> Found:
        """Find the longest hit among the chunks that are held for every rank."""
        return Found(self._longest(prompt, held), held) if held else NOTHING

    def _longest_possible(self, prompt: Prompt) -> Hit:
        """Return the hit if all chunks were stored."""
        return self._groups.longest(*prompt, {group.index: _Everything() for group in self._groups.each})

    def _longest(self, prompt: Prompt, held: Mapping[Rank, Held], more: Iterable[tuple[int, int]] = ()) -> Hit:
        """Find the longest hit among the chunks in `more` and those that are held for every rank."""
        stored: dict[int, set[int]] = {group.index: set() for group in self._groups.each}
        of_all = set.intersection(*(set(each) for each in held.values())) if held else set()
        for index, end in of_all.union(more):
            stored[index].add(end)
        return self._groups.longest(prompt.hashes, prompt.computed, prompt.limit, stored)


def _held(places: Sequence[Place], holders: Sequence[Holder | None]) -> Held:
    pairs = zip(places, holders, strict=False)
    return {(group.index, end): holder for (group, end), holder in pairs if holder is not None}


def _check_ranks(ticket: Ticket, namespace: Namespace) -> None:
    theirs, mine = ticket.group.tp_size, namespace.tp_size
    if theirs != mine:
        raise NamespaceMismatch(
            f"the prefill engine stores KV under {theirs} tensor ranks, and this engine under {mine}; set "
            "'store_tp_size' in kv_connector_extra_config of both engines to the larger tensor_parallel_size"
        )


def _merged(ranks: Iterable[Rank], parts: Sequence[Mapping[Rank, Held]]) -> dict[Rank, Held]:
    """Join the holders of all parts. If several parts have a holder of the same chunk, the last part counts."""
    return {rank: {place: holder for part in parts for place, holder in part.get(rank, {}).items()} for rank in ranks}


def _node_of(held: Held, group: Group, end: int) -> NodeId | None:
    holder = held.get((group.index, end))
    return None if holder is None else holder.node_id
