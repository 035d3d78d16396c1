"""Connects to the raykv node, with retries in the background. Without the node, an engine still starts and serves."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger

from raykv.errors import RayKVError, UsageError
from raykv.integrations.vllm.metadata import Scope
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from raykv import Client

# This logger is a child of vLLM's logger, so vLLM's handlers and level apply.
logger = init_logger("vllm.raykv.connection")

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 30.0
MAX_SCOPED_CLIENTS: Final = 1024
"""A connection keeps at most this many clients of scopes. Beyond that, it drops the oldest client. The limit is needed
because each salt needs a client, and users choose the salts."""


class Connection:
    """Opens one client, and derives from it a client for each `Scope` (adapter, salt and epoch)."""

    def __init__(self, open_client: Callable[[], "Client"]) -> None:
        """Open the client. If the node is unreachable, start to retry in the background.

        Raises:
            UsageError: The configuration is wrong; a retry would not help.
        """
        self._open_client = open_client
        self._client: Client | None = None
        self._scoped: OrderedDict[tuple[bytes, Scope], Client] = OrderedDict()
        self._closed = threading.Event()
        self._retrying: threading.Thread | None = None
        try:
            self._client = open_client()
        except UsageError:
            raise
        except RayKVError as error:
            logger.warning("raykv is away (%s); the engine serves without it, and connects later", error)
            self._retrying = threading.Thread(target=self._retry, name="raykv-connect", daemon=True)
            self._retrying.start()

    def client(self, namespace: Namespace, scope: Scope) -> "Client | None":
        """Return the client for `scope` within `namespace`. None means that no node is connected yet."""
        if self._client is None:
            return None
        key = (namespace.digest, scope)
        found = self._scoped.get(key)
        if found is None:
            revision = scope.epoch or namespace.revision
            found = self._client.using(namespace.with_fields(revision=revision, lora=scope.lora, salt=scope.salt))
            self._scoped[key] = found
            if len(self._scoped) > MAX_SCOPED_CLIENTS:
                self._scoped.popitem(last=False)
        return found

    def close(self) -> None:
        """Stop retrying and close the client. No other method may be called during or after this call."""
        self._closed.set()
        if self._retrying is not None:
            self._retrying.join()
        if self._client is not None:
            self._client.close()

    def _retry(self) -> None:
        delay_s = FIRST_RETRY_S
        while not self._closed.wait(delay_s):
            try:
                self._client = self._open_client()
            except UsageError:
                logger.exception("raykv refuses this engine, which serves without a cache until it is restarted")
                return
            except RayKVError as error:
                delay_s = min(2 * delay_s, LAST_RETRY_S)
                logger.warning("raykv is still away (%s); next try in %.0f s", error, delay_s)
            else:
                logger.info("raykv is connected")
                return
