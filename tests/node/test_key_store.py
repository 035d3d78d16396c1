"""A node's copy of the secrets: the file belongs to this user and this cluster, or is left out."""

import os
import random
from pathlib import Path

import msgspec
import pytest

from raykv.node.key_store import KeyStore, keyring_path
from raykv.protocol.keyring import Keyring
from tests.support.nodes import make_node

FIRST = Keyring.first(b"one")
NEWER = FIRST.next_step(b"two").next_step(b"")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = keyring_path(tmp_path / "raykv-c-n")
    assert made is not None
    return made


def test_newer_secrets_of_the_cluster_outlive_the_process(path):
    store = KeyStore(b"one", path)
    assert store.keyring == FIRST
    assert store.adopt(NEWER)
    assert not store.adopt(NEWER)
    assert not store.adopt(FIRST)
    assert not store.adopt(Keyring(9, b"another", b"theirs"))
    assert store.keyring == KeyStore(b"one", path).keyring == NEWER
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyStore(b"one", None).keyring == FIRST
    assert KeyStore(b"of a later cluster with the same name", path).keyring.version == 1


def test_a_damaged_file_is_left_out(path, rng: random.Random, caplog):
    good = msgspec.msgpack.encode(NEWER)
    for content in [b"", b"\xc0", good[:-1], b"\xff" * 100, *(rng.randbytes(60) for _ in range(50))]:
        path.write_bytes(content)
        assert KeyStore(b"one", path).keyring == FIRST
        assert "no secrets in" in caplog.text
        caplog.clear()
    path.write_bytes(good)
    assert KeyStore(b"one", path).keyring == NEWER


def test_a_planted_file_is_not_read(path, tmp_path):
    """Its owner could choose the secrets of the whole cluster."""
    planted = tmp_path / "planted"
    planted.write_bytes(msgspec.msgpack.encode(NEWER))
    path.symlink_to(planted)
    assert KeyStore(b"one", path).keyring == FIRST
    path.unlink()
    os.mkfifo(path)
    assert KeyStore(b"one", path).keyring == FIRST
    path.unlink()
    planted.rename(path)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert KeyStore(b"one", path).keyring == FIRST
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        assert KeyStore(b"one", path).keyring == FIRST
        os.chown(path, 0, 0)
    assert KeyStore(b"one", path).keyring == NEWER


def test_a_place_that_cannot_be_written_does_no_harm(path, caplog):
    path.mkdir()
    (path / "full").touch()
    store = KeyStore(b"one", path)
    assert store.adopt(NEWER)
    assert store.keyring == NEWER
    assert "cannot be written" in caplog.text


def test_the_file_goes_with_the_nodes_memory(shm_dir):
    node = make_node(secret=b"one", storage={"shm_dir": shm_dir})
    node._keys.adopt(NEWER)
    node.start()
    assert keyring_path(node.config.file_prefix).exists()
    node.stop(unlink=True)
    assert not list(shm_dir.iterdir())
