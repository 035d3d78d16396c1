"""Clients for tests."""

from typing import Any

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig
from raykv.embedded import EmbeddedCluster
from tests.support.nodes import SPACE


def remote_client(running: EmbeddedCluster, node: int = 0, **config: Any) -> raykv.Client:
    """A client that reaches a node over TCP, as from a host without a node."""
    fields = {"address": running.nodes[node].member.address, "secret": running.secret, **config}
    return raykv.Client(SPACE, Router(ClientConfig.load(fields)))
