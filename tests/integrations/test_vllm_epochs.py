"""Weight epochs: after a change of the weights, no engine reuses KV of other weights."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402

import raykv  # noqa: E402
from raykv.errors import PeerUnavailable, UsageError  # noqa: E402
from raykv.integrations.vllm import epochs as epochs_module  # noqa: E402
from raykv.integrations.vllm import state_revision  # noqa: E402
from raykv.integrations.vllm.epochs import EpochDropper, Epochs, Statement, is_private  # noqa: E402
from raykv.integrations.vllm.metadata import WorkerReport  # noqa: E402
from raykv.protocol.namespace import Namespace  # noqa: E402
from tests.support.engines import BLOCK, Engine, prompt, write_model  # noqa: E402
from tests.support.nodes import wait_until  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_full_collections")]

PROMPTS = [prompt(0, 300), prompt(1, 150)]
FULL = sum((len(one) - 1) // BLOCK * BLOCK for one in PROMPTS)
WARM_UP = [prompt(9, 5)]
"""A prompt that fills no block. It causes a step. The step's output brings a statement to the scheduler's side."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two revisions of one model."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / str(seed) / "toy", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def answers(models: list[Path]) -> list[list[list[int]]]:
    """Return the answers that each revision gives without a cache."""
    found = []
    for model in models:
        with Engine(model, None) as engine:
            found.append(engine.answer(PROMPTS))
    assert found[0] != found[1]
    return found


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="64 MiB", extent_nbytes="1 MiB") as made:
        yield made


class Own(Engine):
    """One of several engines in this process. vLLM has only one variable for the connectors of all these engines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        super().__init__(*arguments, **options)
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT

    def use(self) -> Engine:
        """Set vLLM's variable to this engine's connector. Call this before the engine runs."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._agent
        return self

    def close(self) -> None:
        self.use()
        super().close()


def load_weights(worker: Any, model: str) -> None:
    worker.model_runner.reload_weights(weights_path=model)


def update(engine: Engine, model: Path) -> None:
    """Change the weights in place, as a trainer does: pause, update, resume."""
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=True)
    engine.llm.collective_rpc(load_weights, args=(str(model),))
    core.resume_scheduler()


def private_chunks(cluster: raykv.EmbeddedCluster) -> int:
    with cluster.client(Namespace(model="any")) as client:
        return sum(each["chunks"] for each in client.namespaces() if is_private(each["namespace"].revision))


def test_engines_share_only_kv_of_the_weights_that_they_have(
    models: list[Path], cluster: raykv.EmbeddedCluster, answers: list[list[list[int]]]
):
    with Own(models[0], cluster.address(0)) as first, Own(models[0], cluster.address(1)) as second:
        assert first.use().answer(PROMPTS) == answers[0]
        cluster.settle()

        update(second.use(), models[1])  # a private epoch: nothing of the first engine is reused
        assert second.answer(PROMPTS) == answers[1]
        assert second.reused_tokens() == 0
        cluster.settle()
        first.use().llm.reset_prefix_cache()  # empties only the engine's own cache; raykv keeps the KV
        assert first.answer(PROMPTS) == answers[0]
        assert first.reused_tokens() == FULL

        update(first, models[1])  # the weights of the second engine, but without a statement
        assert first.answer(PROMPTS) == answers[1]
        assert first.reused_tokens() == 0
        assert private_chunks(cluster) > 0

        for engine in (first, second):
            engine.use().llm.collective_rpc(state_revision, args=("step 7",))
            engine.answer(WARM_UP)
        second.llm.reset_prefix_cache()
        assert second.answer(PROMPTS) == answers[1]
        assert second.reused_tokens() == 0
        cluster.settle()
        first.use().llm.reset_prefix_cache()
        assert first.answer(PROMPTS) == answers[1]
        assert first.reused_tokens() == FULL
        wait_until(lambda: private_chunks(cluster) == 0)
    with Engine(models[1], cluster.address(0), extra={"revision": "step 7"}) as third:
        assert third.answer(PROMPTS) == answers[1]
        assert third.counted("reused_tokens") == FULL


def test_an_engine_that_ends_frees_its_private_epoch(models: list[Path], cluster: raykv.EmbeddedCluster):
    with Engine(models[0], cluster.address(0)) as engine:
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.answer(PROMPTS)
        cluster.settle()
        assert private_chunks(cluster) > 0
    assert private_chunks(cluster) == 0


def test_running_requests_begin_again_when_the_caches_are_reset(
    models: list[Path], cluster: raykv.EmbeddedCluster, answers: list[list[list[int]]]
):
    with Engine(models[0], cluster.address(0)) as engine:
        core = engine.llm.llm_engine.engine_core.engine_core
        count = 0
        step = core.step_fn

        def step_and_reset() -> Any:
            nonlocal count
            count += 1
            if count in (2, 4, 9):
                assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            return step()

        core.step_fn = step_and_reset
        assert engine.answer(PROMPTS) == answers[0]
        assert count > 9
        assert engine.counted("reused_tokens") == 0


def test_sleep_and_wake_up(models: list[Path], cluster: raykv.EmbeddedCluster, answers: list[list[list[int]]]):
    with Engine(models[0], cluster.address(0)) as engine:
        assert engine.answer(PROMPTS) == answers[0]
        for reused in (0, FULL):
            engine.llm.sleep(level=1)
            engine.llm.wake_up()
            engine.llm.collective_rpc(state_revision, args=("the same",))
            engine.answer(WARM_UP)
            assert engine.answer(PROMPTS) == answers[0]
            assert engine.counted("reused_tokens") == reused


# -- without an engine ------------------------------------------------------------------------------------------------


def test_a_statement_ends_only_the_private_epoch_before_it():
    epochs = Epochs()
    assert not epochs.accept([Statement.now("1")]), "no reset before it: the engine may have old blocks"
    assert epochs.current == ""
    old = Statement.now("1")
    epochs.reset()
    private = epochs.current
    assert is_private(private)
    assert not epochs.accept([old]), "it is about the weights before the reset"
    assert not epochs.accept([Statement("1", "another host", time.monotonic_ns())])
    assert epochs.current == private
    first, second = Statement.now("1"), Statement.now("2")
    assert epochs.accept(WorkerReport(0.0, {}, stated=[second]).aggregate(WorkerReport(0.0, {}, stated=[first])).stated)
    assert epochs.current == "stated:2"
    assert not epochs.accept([Statement.now("2")])
    assert not epochs.accept([Statement.now("3")])
    epochs.reset()
    assert epochs.current not in (private, "stated:2")


@pytest.mark.parametrize("revision", ["", None, 7])
def test_a_revision_is_a_text(revision: Any):
    with pytest.raises(UsageError, match="'revision'"):
        state_revision(None, revision)


def test_a_statement_needs_the_connector():
    with pytest.raises(UsageError, match="kv_transfer_config"):
        state_revision(None, "1")


class Client:
    """A client whose node does not answer until `up` is set."""

    def __init__(self, revision: str) -> None:
        self.namespace, self.router = Namespace(model="m", revision=revision), SimpleNamespace(writer=None)
        self.up, self.tries, self.dropped = False, 0, False

    def drop_namespace(self, *, timeout_s: float) -> int:
        self.tries += 1
        if not self.up:
            raise PeerUnavailable("away")
        self.dropped = True
        return 1


def test_drops_are_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(epochs_module, "RETRY_S", 0.01)
    dropper, clients = EpochDropper(), [Client("a"), Client("b")]
    for client in clients:
        dropper.drop(client)
    wait_until(lambda: clients[0].tries > 2)
    for client in clients:
        client.up = True
    wait_until(lambda: all(client.dropped for client in clients))
    dropper.close()


def test_close_does_not_wait_for_a_node_that_is_away():
    dropper, client = EpochDropper(), Client("a")
    dropper.drop(client)
    wait_until(lambda: client.tries > 0)
    for number in range(2 * epochs_module.MAX_PENDING_DROPS):
        dropper.drop(Client(str(number)))
    assert len(dropper._pending) <= epochs_module.MAX_PENDING_DROPS
    began_s = time.monotonic()
    dropper.close()
    assert time.monotonic() - began_s < 5.0
