"""A pytest plugin that replaces vLLM's connectors by RayKVConnector, and reports which tests were run.

A test must pass, or the table of `not_applicable` must say why it does not apply. A skip for another reason is an
error, and so is an entry of the table that fits no test.
"""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if "tblib" not in sys.modules:  # vLLM's conftest imports it, but only GPU tests use it
    support: Any = ModuleType("tblib.pickling_support")
    support.install = lambda: None
    package: Any = ModuleType("tblib")
    package.pickling_support = support
    sys.modules |= {"tblib": package, "tblib.pickling_support": support}

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm_conformance import store_cases
from vllm_conformance.not_applicable import NOT_APPLICABLE
from vllm_conformance.stand_in import ScriptedConnector, StandIn, raykv_node, stand_ins

from raykv.integrations.vllm.metadata import StepOrders

__all__ = ["raykv_node", "stand_ins"]  # fixtures

FOLDER = "tests/v1/kv_connector/"
UNIT = "tests.v1.kv_connector.unit"
REPLACED = ("NixlConnector", "SimpleCPUOffloadConnector", "OffloadingConnector", "MockHMAConnector")
"""Connectors that `raykv_in_place` replaces in vLLM's factory. All of them support hybrid models. Other connectors are
not replaced, because some tests need one without this support."""
MODEL = "facebook/opt-125m"
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}

files: dict[str, str] = {}
"""Maps each file that is not collected to the reason."""
fitting: set[str] = set()
"""Entries of `NOT_APPLICABLE` that fit a file or a test."""
outcomes: Counter[str] = Counter()
failed: set[str] = set()
skipped: set[str] = set()
problems: list[str] = []


def reason_of(name: str) -> str | None:
    """Return why a file or test does not apply, by its name within `FOLDER`. None if it applies."""
    for pattern, reason in NOT_APPLICABLE.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name):
            fitting.add(pattern)
            return reason
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    name = str(collection_path).partition(FOLDER)[2]
    reason = reason_of(name) if name.endswith(".py") else None
    if reason is None:
        return None
    if collection_path.name.startswith("test_"):
        files[name] = reason
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = reason_of(item.nodeid.removeprefix(FOLDER))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"does not apply: {reason}"))


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("cpu_test", "asyncio", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{mark}: of vLLM")


@pytest.fixture(scope="session")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a folder with the configuration of the model that most tests name. Scheduler tests read no other file."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return str(folder)


@pytest.fixture(autouse=True)
def raykv_in_place(
    request: pytest.FixtureRequest,
    local_model: str,
    stand_ins: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[None]:
    """Replace vLLM's connectors, its mocks of connectors, and the model, which is not on this machine."""
    monkeypatch.chdir(tmp_path)
    used: list[type] = []
    for name in REPLACED:
        monkeypatch.setitem(KVConnectorFactory._registry, name, lambda: used.append(StandIn) or StandIn)
    utils = importlib.import_module(f"{UNIT}.utils")
    original, core = utils.create_vllm_config, importlib.import_module("tests.v1.core.utils")

    def create_vllm_config(*arguments: Any, **options: Any) -> Any:
        """Set the local folder of the model, and the failure policy that RayKVConnector needs."""
        if not arguments and options.get("model", MODEL) == MODEL:
            options["model"] = local_model
        for child in (options.get("kv_connector_extra_config") or {}).get("connectors", ()):
            child.setdefault("kv_load_failure_policy", "recompute")
        return original(*arguments, **{"kv_load_failure_policy": "recompute", **options})

    replaced = {
        "create_vllm_config": create_vllm_config,
        "create_mock_connector": ScriptedConnector,
        "ExampleConnector": StandIn,
        "ExampleConnectorMetadata": StepOrders,
    }
    if getattr(request.module, "create_scheduler", None) is core.create_scheduler:
        replaced["create_scheduler"] = partial(core.create_scheduler, local_model)
    if hasattr(request.module, "_DictStore"):
        replaced |= store_cases.replacements(partial(create_vllm_config, kv_role="kv_both"), request.module._DictStore)
    for module in (utils, request.module):
        for name, value in replaced.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    yield
    request.node.user_properties.append(("raykv", bool(used or stand_ins)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed.add(report.nodeid)
    elif report.skipped:
        skipped.add(report.nodeid)
        if reason_of(report.nodeid.removeprefix(FOLDER)) is None:
            problems.append(f"{report.nodeid}: skipped by vLLM, and not in the table: {report.longrepr}")
    elif report.when == "teardown" and report.nodeid not in failed and report.nodeid not in skipped:
        outcomes["with raykv" if dict(report.user_properties).get("raykv") else "without"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.option.keyword and session.config.args == [FOLDER.rstrip("/")]:
        problems.extend(f"{pattern}: fits no test" for pattern in NOT_APPLICABLE if pattern not in fitting)
    if problems and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    for problem in problems:
        write(f"PROBLEM {problem}", red=True)
    for reason, count in Counter(files.values()).most_common():
        write(f"{count:3} files do not apply: {reason}")
    for reason, count in Counter(reason_of(name.removeprefix(FOLDER)) for name in skipped).most_common():
        write(f"{count:3} tests do not apply: {reason}")
    write(
        f"{outcomes['with raykv']} tests passed with RayKVConnector, {outcomes['without']} tests of vLLM alone passed, "
        f"{len(skipped)} tests and {len(files)} files do not apply, {len(failed)} failed, {len(problems)} problems"
    )
