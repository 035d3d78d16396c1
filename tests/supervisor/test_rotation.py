"""A node process is killed in every stage of a rotation of the secret. It joins again, with the newest secrets."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.errors import PeerUnavailable
from raykv.node.key_store import keyring_path
from raykv.protocol import messages
from raykv.protocol.keyring import Keyring, Stage
from raykv.supervisor.handle import NodeHandle
from raykv.transport.handshake import WrongSecret
from raykv.transport.link import Link
from tests.support.nodes import wait_until

FIRST = b"f" * 32


@contextmanager
def two_nodes(shm_dir: Path) -> Iterator[tuple[InProcessMembership, list[NodeHandle]]]:
    directory = InProcessMembership(member_timeout_s=10.0, keyring=Keyring.first(FIRST))
    storage = {"arena_nbytes": "4 MiB", "extent_nbytes": "1 MiB", "shm_dir": str(shm_dir)}
    handles: list[NodeHandle] = []
    try:
        for name in ("a", "b"):
            fields = {"node_id": name, "host": name, "storage": storage, "heartbeat_s": 0.05}
            handles.append(NodeHandle(NodeConfig.load(fields), secret=FIRST, membership=directory))
        yield directory, handles
    finally:
        for handle in handles:
            handle.stop(unlink=True)
    assert not list(shm_dir.iterdir())


def kill(handle: NodeHandle) -> None:
    """Kill the node. Wait until it serves again."""
    starts = handle.starts
    os.kill(handle.pid, signal.SIGKILL)
    wait_until(lambda: handle.starts == starts + 1)


def accepts(handle: NodeHandle, secret: bytes) -> bool:
    deadline_s = time.monotonic() + 5.0
    try:
        with closing(Link.connect(str(handle.stats()["address"]), secret, deadline_s=deadline_s)) as link:
            return isinstance(link.call(messages.GetView(), deadline_s=deadline_s), messages.ViewIs)
    except WrongSecret:
        return False


@pytest.mark.parametrize("file", ["stays", "is lost"])
def test_a_node_that_is_killed_in_the_middle_joins_again(shm_dir, file):
    with two_nodes(shm_dir) as (directory, (a, b)):
        secrets = [FIRST]
        for stage in (Stage.ADDED, Stage.USED, Stage.STEADY):
            wait_until(lambda: not directory.logic.behind())
            assert directory.rotate() is stage
            if file == "is lost":
                path = keyring_path(a.config.file_prefix)
                assert path is not None
                path.unlink(missing_ok=True)
            kill(a)
            wait_until(lambda: not directory.logic.behind())
            ring = directory.logic.keyring
            assert ring is not None
            secrets += [secret for secret in ring.accepted if secret not in secrets]
            for handle in (a, b):
                assert [accepts(handle, secret) for secret in secrets] == [
                    secret in ring.accepted for secret in secrets
                ]
        assert len(secrets) == 2


def test_a_node_restarts_with_its_last_secrets_while_the_directory_is_away(shm_dir, monkeypatch):
    with two_nodes(shm_dir) as (directory, (a, _)):
        for _ in range(3):
            wait_until(lambda: not directory.logic.behind())
            directory.rotate()
        wait_until(lambda: not directory.logic.behind())
        ring = directory.logic.keyring
        assert ring is not None

        def away(heartbeat: messages.Heartbeat) -> messages.HeartbeatAnswer:
            raise PeerUnavailable("away")

        monkeypatch.setattr(directory, "beat", away)
        kill(a)
        assert (accepts(a, FIRST), accepts(a, ring.current)) == (False, True)
