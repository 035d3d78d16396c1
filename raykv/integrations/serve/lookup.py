"""Reads the prompts of requests as their engine would, and looks them up in raykv."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

import raykv
from raykv.client.request_trail import TrailSender
from raykv.cluster import find_address
from raykv.errors import PeerUnavailable, RayKVError
from raykv.integrations.routing.choice import RouterOptions
from raykv.integrations.routing.locations import ChunkFinder, Run, Stored
from raykv.integrations.routing.prompts import Naming, PrefixEnd, Prompt
from raykv.integrations.routing.reader import Reader
from raykv.integrations.routing.report import Adapter, EngineReport, ReplicaReport, TokenizerReport
from raykv.integrations.routing.segments import cut_tokens
from raykv.integrations.serve.texts import Texts
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.metadata import Scope
from raykv.integrations.vllm.namespace import hash_algorithm
from raykv.protocol.namespace import Namespace
from raykv.protocol.request_trail import TrailEntry

log = logging.getLogger("ray.serve")

CONNECT_TIMEOUT_S: Final = 1.0
RETRY_S: Final = 30.0
"""A tokenizer that could not be loaded is tried again after this time."""


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt, and where to look it up. `scope` None: its adapter is not known yet, so it is not looked up."""

    prompt: Prompt
    scope: Scope | None


class PromptLookup:
    """Reads prompts with the tokenizer that the replicas report, under the namespace that their engines report."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._finder = ChunkFinder(options.lookup_timeout_s)
        self._loaded: tuple[TokenizerReport, Texts, Reader] | None = None
        self._connection: Connection | None = None
        self._loading: threading.Thread | None = None
        self._connecting: threading.Thread | None = None
        self._failed_s = -RETRY_S
        self._engine: EngineReport | None = None
        self._namespace: Namespace | None = None  # that of `_engine`, which has computed its digest
        self._naming: Naming | None = None
        self._adapters: dict[str, Adapter] = {}
        self._near: list[tuple[str, ...]] = []
        self._sender = TrailSender(self._send)

    def use(self, reports: Sequence[ReplicaReport]) -> None:
        """Use the reports of the running replicas. Loads the tokenizer and connects to raykv, on threads."""
        self._adapters = {name: each for report in reports for name, each in report.adapters.items()}
        self._near = [report.engine.near for report in reports if report.engine is not None]
        tokenizer = next((report.tokenizer for report in reports if report.tokenizer is not None), None)
        is_new = tokenizer is not None and (self._loaded is None or self._loaded[0] != tokenizer)
        if is_new and self._loading is None and time.monotonic() >= self._failed_s + RETRY_S:
            self._loading = threading.Thread(target=self._load, args=(tokenizer,), name="raykv-tokenizer", daemon=True)
            self._loading.start()
        engine = next((report.engine for report in reports if report.engine is not None), None)
        if engine is not None:
            self._use_engine(engine)

    async def read(self, request: Any) -> Found | None:
        """Read the prompt of a request. None: it has none that can be read, or the tokenizer is not loaded yet."""
        if self._loaded is None:
            return None
        _, texts, reader = self._loaded
        text = texts.text(request)
        if text is None:
            return None
        is_text = isinstance(text, str)
        segments = texts.cutter.cut(text) if isinstance(text, str) else cut_tokens(text)
        adds = getattr(request, "add_special_tokens", False) and is_text
        start = PrefixEnd(rest=texts.prefix) if adds else PrefixEnd()
        model, salt = str(getattr(request, "model", "")), str(getattr(request, "cache_salt", None) or "")
        adapter = self._adapters.get(model)
        naming = self._naming_of(model, adapter, salt)
        scope = repr((model, adapter, salt, is_text, start.rest)).encode("utf-8", "surrogatepass")
        prompt = await reader.read(scope, segments, naming, start)
        return Found(prompt, Scope(lora=adapter.scope if adapter else "", salt=salt) if naming is not None else None)

    def at_best(self, found: Found) -> Stored:
        """Return the best answer that `ask` could give."""
        digest = b"" if self._namespace is None else self._namespace.digest
        return Stored((Run(len(found.prompt.names), ()),), digest)

    def here(self, found: Found) -> Stored | None:
        """Look a prompt up without a call. None: raykv must be asked."""
        namespace, client = self._namespace, self._client(found)
        if namespace is None or client is None:
            return None
        near = client.nodes_on_this_host()
        all_near = all(near.intersection(each) for each in self._near)
        runs = self._finder.here(client, found.prompt.names, all_near=all_near)
        return None if runs is None else Stored(runs, namespace.digest)

    async def ask(self, found: Found) -> Stored | None:
        """Ask raykv for a prompt. None: raykv does not answer."""
        namespace, client = self._namespace, self._client(found)
        if namespace is None or client is None:
            return None
        runs = await self._finder.ask(client, found.prompt.names)
        return None if runs is None else Stored(runs, namespace.digest)

    def add_to_trail(self, request_id: str, text: str) -> None:
        """Send a sentence about a request to the node, on a thread, if raykv is connected."""
        if self._connection is not None and self._namespace is not None:
            self._sender.add(request_id, text)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _client(self, found: Found) -> raykv.Client | None:
        """Return the client for a prompt. None: raykv is not connected, or the prompt's adapter is not known yet."""
        namespace, connection = self._namespace, self._connection
        if namespace is None or connection is None or found.scope is None:
            return None
        return connection.client(namespace, found.scope)

    def _send(self, entries: list[TrailEntry]) -> None:
        namespace, connection = self._namespace, self._connection
        client = connection.client(namespace, Scope()) if namespace and connection else None
        if client is None:
            raise PeerUnavailable("the router is not connected to raykv")
        client.add_to_trail(entries)

    def _use_engine(self, engine: EngineReport) -> None:
        before, self._engine = self._engine, engine
        if self._namespace is None or self._namespace != engine.namespace:
            self._namespace = engine.namespace
        if before is None or _naming_fields(before) != _naming_fields(engine):
            self._naming = naming_of(engine)
            if self._loaded is not None:
                settings, texts, _ = self._loaded
                self._loaded = settings, texts, self._new_reader(texts)  # names of before may differ
        if self._connection is None and self._connecting is None:
            connect = partial(self._connect, engine.namespace)
            self._connecting = threading.Thread(target=connect, name="raykv-router", daemon=True)
            self._connecting.start()

    def _naming_of(self, model: str, adapter: Adapter | None, salt: str) -> Naming | None:
        """Return how the engine names the chunks of a request. The extra keys are those of vLLM's block hashes."""
        base = self._naming
        if base is None or (adapter is None and ":" in model):  # Ray Serve's name of an adapter: no report has it yet
            return None
        always = (("lora", model, adapter.path),) if adapter else ()
        first = (("cache_salt", salt),) if salt else ()
        return Naming(base.function, base.seed, base.hash_tokens, base.chunk_tokens, base.suffix, always, first)

    def _load(self, settings: TokenizerReport) -> None:
        try:
            texts = Texts(settings)
        except Exception:
            self._failed_s = time.monotonic()
            log.warning("raykv: no tokenizer for %r, so requests are routed without", settings.tokenizer, exc_info=True)
        else:
            self._loaded = settings, texts, self._new_reader(texts)
        self._loading = None

    def _new_reader(self, texts: Texts) -> Reader:
        if self._loaded is not None:
            self._loaded[2].close()
        return Reader(texts.tokens, timeout_s=self._options.tokenize_timeout_s)

    def _connect(self, namespace: Namespace) -> None:
        """Connect to raykv. `Connection` tries again until it succeeds."""
        options = self._options

        def open_client() -> raykv.Client:
            address = options.address or find_address(options.cluster)
            return raykv.connect(namespace, address=address, timeout_s=CONNECT_TIMEOUT_S)

        try:
            self._connection = Connection(open_client)
        except RayKVError as error:
            log.warning("raykv: the router goes on without raykv (%s)", error)


def _naming_fields(engine: EngineReport) -> tuple[object, ...]:
    return engine.hash_tokens, engine.chunk_tokens, engine.suffix, engine.namespace.hash_algorithm


def naming_of(engine: EngineReport) -> Naming | None:
    """Return how this engine names chunks. None: with a hash function or a seed that this process does not have."""
    algorithm = engine.namespace.hash_algorithm.partition(":")[0]
    try:
        if hash_algorithm(algorithm) != engine.namespace.hash_algorithm:
            return None
        function = get_hash_fn_by_name(algorithm)
    except (RayKVError, ValueError, ImportError):
        return None
    seed = function(resolve_none_hash_seed(function))
    return Naming(function, seed, engine.hash_tokens, engine.chunk_tokens, engine.suffix.encode())
