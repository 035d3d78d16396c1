"""A cluster with TLS: every read, store and lookup between hosts, and clients with and without certificates."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import raykv
from raykv.config import ClientConfig
from raykv.errors import ConfigError, TransientError
from tests.support.clients import remote_client
from tests.support.nodes import NBYTES, SPACE, cluster, content, get, names, put


@pytest.fixture
def running(tls) -> Iterator[raykv.EmbeddedCluster]:
    with cluster(2, tls=tls._config) as made:
        yield made


def test_chunks_travel_between_hosts(running):
    """The clients learn from their nodes where the certificates are."""
    writer, reader = (running.client(SPACE, node=node) for node in range(2))
    keys = names(20)
    assert put(writer, keys).stored == 20
    running.settle()
    assert reader.match(keys).count == 20
    into = [bytearray(NBYTES) for _ in keys]
    result = reader.get(keys, into)
    assert into == [content(key) for key in keys]
    assert result.nbytes_by_path == {"tcp": 20 * NBYTES}
    assert reader.delete(keys) == 20


def test_a_client_on_a_host_without_a_node(running, tls, monkeypatch):
    for field in ("certificate", "private_key", "ca"):
        monkeypatch.setenv(f"RAYKV_TLS_{field.upper()}", str(getattr(tls._config, field)))
    with remote_client(running, tls=ClientConfig.from_environment().tls) as client:
        assert put(client, names(4)) == raykv.PutResult(4, 0, 0)
        assert get(client, names(4)) == (True,) * 4


def test_a_client_without_certificates_is_refused(running):
    with pytest.raises(TransientError):
        remote_client(running)


def test_a_node_with_wrong_files_does_not_start(tls):
    with pytest.raises(ConfigError, match=r"field 'tls\.ca': cannot read /nowhere"):
        cluster(1, tls=tls._config.model_copy(update={"ca": Path("/nowhere")}))


def test_a_client_that_cannot_read_the_files_of_its_node(authority, tmp_path):
    given = authority.issue("short-lived")
    private_key = tmp_path / "node.key"
    private_key.write_bytes(given.private_key.read_bytes())
    with cluster(1, tls=given.model_copy(update={"private_key": private_key})) as running:
        private_key.unlink()
        with pytest.raises(ConfigError, match=r"field 'tls\.private_key': cannot read"):
            running.client(SPACE)
        assert put(running.client(SPACE, tls=given), names(2)).stored == 2
