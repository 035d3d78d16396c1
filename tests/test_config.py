"""Configs: sizes as text, derived values, the environment, and errors that name the wrong field."""

from pathlib import Path

import pytest
from pydantic import ValidationError

import raykv
from raykv.config import ClientConfig, ClusterConfig, NodeConfig, StorageConfig, TlsConfig, parse_nbytes, rdma_devices
from raykv.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17 b", 17),
        ("1KiB", 1024),
        ("1.5 KiB", 1536),
        (" 2 mib ", 2 << 20),
        ("4 GiB", 4 * GIB),
        ("2 TiB", 2 << 40),
        ("0.5GiB", GIB // 2),
        (17, 17),
    ],
)
def test_sizes_as_text(text, nbytes):
    assert parse_nbytes(text) == nbytes
    assert (
        StorageConfig.load({"arena_nbytes": text, "extent_nbytes": 4096}).arena_nbytes == nbytes
        if nbytes > 4096
        else True
    )


NOT_SIZES = ["", "GiB", "1 GB", "-1", "1e9", "1,5 GiB", "1 GiB or so", "one", "9" * 400, "9" * 5000, "\u0661 GiB"]


@pytest.mark.parametrize("text", NOT_SIZES, ids=range(len(NOT_SIZES)))
def test_text_that_is_not_a_size(text):
    with pytest.raises(ConfigError, match=r"arena_nbytes.*is not a size.*4 GiB"):
        StorageConfig.load({"arena_nbytes": text})


def test_an_unknown_field_is_named_with_those_there_are():
    with pytest.raises(ConfigError) as caught:
        StorageConfig.load({"arena_bytes": 1, "policy": "sieve"})
    text = str(caught.value)
    assert "unknown field 'arena_bytes'; StorageConfig has: arena_nbytes, extent_nbytes" in text
    assert "field 'policy'" in text
    with pytest.raises(ConfigError, match=r"unknown field 'storage\.size'"):
        NodeConfig.load({"node_id": "n", "storage": {"size": 1}})
    with pytest.raises(ConfigError, match="colour"):
        raykv.embedded(colour="red")
    with pytest.raises(ConfigError, match="colour"):
        raykv.connect(raykv.Namespace(model="m"), colour="red")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"extent_nbytes": 5000}, "multiple of 4096"),
        ({"extent_nbytes": 0}, "multiple of 4096"),
        ({"arena_nbytes": 4096, "extent_nbytes": 8192}, "at least one extent"),
        ({"low_water": 0.1, "high_water": 0.05}, "low_water must be below"),
        ({"low_water": -0.1}, "low_water"),
        ({"max_chunks": 3}, "max_chunks"),
        ({"arena_nbytes": -1}, "arena_nbytes"),
        ({"arena_nbytes": None}, "arena_nbytes"),
    ],
)
def test_storage_that_cannot_be(fields, words):
    with pytest.raises(ConfigError, match=words):
        StorageConfig.load(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"node_id": ""},
        {"node_id": "a/b"},
        {"node_id": "../x"},
        {"node_id": "a" * 65},
        {"node_id": "n", "cluster": "a b"},
        {"node_id": "n", "bind": "nowhere"},
        {"node_id": "n", "heartbeat_s": 0},
        {"node_id": "n", "max_connections": 0},
        {"node_id": "n", "io_timeout_s": float("inf")},
        {"node_id": "n", "heartbeat_s": float("nan")},
    ],
)
def test_nodes_that_cannot_be(fields):
    with pytest.raises(ConfigError, match=list(fields)[-1] if fields else "node_id"):
        NodeConfig.load(fields)


def test_a_path_too_long_for_a_socket_names_the_fields(shm_dir):
    deep = shm_dir / ("d" * 100)
    fields = {"node_id": "n", "storage": {"shm_dir": deep}}
    from raykv.embedded import InProcessMembership
    from raykv.node.node import Node

    with pytest.raises(ConfigError, match="shorter node_id, cluster or shm_dir"):
        Node(NodeConfig.load(fields), secret=b"", membership=InProcessMembership(member_timeout_s=1.0))


@pytest.mark.parametrize("fields", [{"timeout_s": float("nan")}, {"timeout_s": float("inf")}])
def test_clients_that_cannot_be(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ClientConfig.load(fields)


def test_options_of_tiers_from_outside_travel_with_the_config():
    storage = StorageConfig.load({"tiers": {"toy": {"path": "/tmp/x", "depth": 3}}})
    assert StorageConfig.load(storage.model_dump(mode="json")) == storage
    assert StorageConfig().tiers == {}
    with pytest.raises(ConfigError, match="tiers"):
        StorageConfig.load({"tiers": {"toy": 5}})


TLS = {"certificate": "/t/node.pem", "private_key": "/t/node.key", "ca": "/t/ca.pem"}


@pytest.mark.parametrize("field", list(TLS))
def test_tls_that_cannot_be(field):
    for wrong in ({**TLS, field: "relative.pem"}, {**TLS, field: 5}, {key: TLS[key] for key in TLS if key != field}):
        with pytest.raises(ConfigError, match=rf"field 'tls\.{field}'"):
            NodeConfig.load({"node_id": "n", "tls": wrong})
    with pytest.raises(ConfigError, match=r"unknown field 'tls\.name'"):
        ClusterConfig.load({"tls": {**TLS, "name": "x"}})


def test_tls_travels_with_the_config_of_a_node():
    config = NodeConfig.load({"node_id": "n", "tls": TLS})
    assert NodeConfig.load(config.model_dump(mode="json")) == config
    assert NodeConfig.load({"node_id": "n"}).tls is None


def test_the_environment_gives_the_files_for_tls(monkeypatch):
    assert ClientConfig.from_environment().tls is None
    for field, path in TLS.items():
        monkeypatch.setenv(f"RAYKV_TLS_{field.upper()}", path)
    assert ClientConfig.from_environment().tls == TlsConfig.load(TLS)
    given = TlsConfig.load({**TLS, "ca": "/other"})
    assert ClientConfig.from_environment(tls=given).tls == given
    monkeypatch.delenv("RAYKV_TLS_CA")
    with pytest.raises(ConfigError, match=r"'tls\.ca'"):
        ClientConfig.from_environment()


def test_configs_are_frozen():
    config = StorageConfig()
    with pytest.raises(ValidationError):
        config.arena_nbytes = 1


def test_files_of_a_node():
    config = NodeConfig.load({"node_id": "n", "cluster": "c", "storage": {"shm_dir": "/dev/shm"}})
    assert config.file_prefix == Path("/dev/shm/raykv-c-n")
    assert config.local_address == "unix:/dev/shm/raykv-c-n.sock"
    nameless = NodeConfig.load({"node_id": "n", "storage": {"shm_dir": None}})
    assert nameless.file_prefix is None
    assert nameless.local_address.startswith("unix:@raykv-default-n-")


def test_derived_numbers():
    config = StorageConfig.load({"arena_nbytes": "100 MiB", "extent_nbytes": "32 MiB"})
    assert (config.extents, config.rows) == (3, 1600)
    assert StorageConfig(max_chunks=77).rows == 77
    assert ClusterConfig().storage == StorageConfig()


def test_the_environment_fills_what_the_call_leaves_open(monkeypatch):
    monkeypatch.setenv("RAYKV_ADDRESS", "unix:/from/environment")
    monkeypatch.setenv("RAYKV_SECRET", "00ff")
    config = ClientConfig.from_environment()
    assert config.address == "unix:/from/environment"
    assert config.secret is not None
    assert config.secret.get_secret_value() == "00ff"
    assert "00ff" not in repr(config) + config.model_dump_json()
    assert ClientConfig.from_environment(address="unix:/given").address == "unix:/given"
    monkeypatch.delenv("RAYKV_ADDRESS")
    with pytest.raises(ConfigError, match=r"'address'.*RAYKV_ADDRESS"):
        raykv.connect(raykv.Namespace(model="m"))
    with pytest.raises(raykv.TransientError):
        raykv.connect(raykv.Namespace(model="m"), address="unix:/nobody/there")


@pytest.mark.parametrize(
    ("value", "tls", "devices"),
    [
        ("auto", False, ()),
        ("auto", True, None),
        ("off", False, None),
        ("mlx5_0", True, ("mlx5_0",)),
        ("mlx5_0,mlx5_1", False, ("mlx5_0", "mlx5_1")),
    ],
)
def test_rdma_devices(value, tls, devices):
    assert rdma_devices(ClientConfig.load({"rdma": value}).rdma, tls=tls) == devices


@pytest.mark.parametrize("value", ["", "a,", "a b", "a;b", 3])
def test_wrong_rdma_devices(value):
    with pytest.raises(ConfigError, match="field 'rdma'"):
        ClientConfig.load({"rdma": value})
