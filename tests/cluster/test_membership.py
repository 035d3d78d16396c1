"""The connection between the owners of nodes and the directory actor. Ray is replaced by direct calls."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from raykv.cluster import membership as module
from raykv.cluster.membership import Endpoint, RayMembership, open_endpoint
from raykv.config import ClusterConfig
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError, PeerUnavailable
from raykv.protocol.keyring import Keyring
from raykv.protocol.messages import Heartbeat
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member
from tests.support.protocol import change

MEMBER = Member("a", "h", {"tcp": "x:1"}, 1.0, 7)


class Actor:
    """Stands for the directory actor. `calls`: names of the methods that were called through Ray."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.logic = InProcessMembership(member_timeout_s=60.0, keyring=Keyring.first(bytes(32)))
        self.beat, self.configure, self.leave = self.logic.beat, self.logic.configure, self.logic.leave
        self.cluster, self.calls, self.away = cluster, list[str](), False
        self.open()

    def open(self) -> None:
        self.server, self._endpoint = open_endpoint(self.logic, self.cluster)

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def call(self, method: str) -> Callable[..., Any]:
        def remote(*arguments: Any) -> Any:
            self.calls.append(method)
            if self.away:
                raise module.ray.exceptions.GetTimeoutError("no answer")
            return getattr(self, method)(*arguments)

        return remote


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def cluster(request: pytest.FixtureRequest, authority) -> ClusterConfig:
    return ClusterConfig.load({"name": "t", "tls": authority.issue("directory") if request.param else None})


@pytest.fixture
def actor(cluster: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    made = Actor(cluster)
    names = ("beat", "configure", "leave", "endpoint")
    handle = SimpleNamespace(**{name: SimpleNamespace(remote=made.call(name)) for name in names})
    monkeypatch.setattr(module.ray, "get_actor", lambda *_, **__: handle)
    monkeypatch.setattr(module.ray, "get", lambda answer, **_: answer)
    yield made
    made.server.close()


def test_only_the_first_call_goes_through_ray(actor: Actor, cluster: ClusterConfig):
    asked = RayMembership(cluster)
    version = actor.logic.logic.keyring.version
    assert asked.beat(Heartbeat(MEMBER, 0, keyring_version=version)).view is not None
    assert actor.calls == ["beat", "endpoint"]
    actor.away = True
    assert asked.beat(Heartbeat(MEMBER, 1, keyring_version=version)).view is None
    asked.configure(change(Namespace(model="m"), {"priority": 2}))
    with pytest.raises(ConfigError, match="sieve"):
        asked.configure(change(Namespace(model="m"), {"policy": "sieve"}))
    asked.leave("a")
    assert not actor.logic.logic.view.members
    assert actor.calls == ["beat", "endpoint"]


def test_secrets_go_through_ray_alone(actor: Actor, cluster: ClusterConfig):
    asked = RayMembership(cluster)
    asked.beat(Heartbeat(MEMBER, 0))
    actor.calls.clear()
    assert asked.beat(Heartbeat(MEMBER, 0)).keyring == actor.logic.logic.keyring
    newer = Heartbeat(MEMBER, 0, keyring_version=1 << 40)
    assert asked.beat(newer).want_keyring
    newer.keyring = actor.logic.logic.keyring
    asked.beat(newer)
    assert actor.calls == ["beat", "endpoint"] * 3


def test_an_actor_that_was_restarted_is_found_again(actor: Actor, cluster: ClusterConfig):
    asked, version = RayMembership(cluster), actor.logic.logic.keyring.version
    heartbeat = Heartbeat(MEMBER, 0, keyring_version=version)
    asked.beat(heartbeat)
    actor.server.close()
    actor.away = True
    with pytest.raises(PeerUnavailable, match="away"):
        asked.beat(heartbeat)
    actor.open()
    actor.away = False
    asked.beat(heartbeat)
    actor.calls.clear()
    asked.beat(heartbeat)
    assert actor.calls == []


def test_a_restarted_actor_is_the_only_one_that_is_trusted(actor: Actor, cluster: ClusterConfig):
    """Another process may get the port of an actor that has ended. It does not know the secret."""
    asked = RayMembership(cluster)
    asked.beat(Heartbeat(MEMBER, 0))
    actor._endpoint = actor.endpoint()._replace(secret=b"another")
    stranger = RayMembership(cluster)
    stranger.beat(Heartbeat(MEMBER, 0))
    actor.away = True
    with pytest.raises(PeerUnavailable, match="away"):
        stranger.beat(Heartbeat(MEMBER, 1, keyring_version=actor.logic.logic.keyring.version))
