"""What the prefill and the decode engine of Ray Serve are asked for."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve.llm")

from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

import raykv
from raykv.integrations.serve.backend import RayKVBackend
from raykv.protocol.ticket import HAND_OFF, MAX_HAND_OFF

pytestmark = pytest.mark.vllm


def backend(**extra: Any) -> RayKVBackend:
    extra = {"address": "unix:/nowhere", **extra}
    made = RayKVBackend(SimpleNamespace(engine_kwargs={"kv_transfer_config": {"kv_connector_extra_config": extra}}))
    made.setup()
    assert extra == {"address": "unix:/nowhere"}, "the connector refuses fields that it does not know"
    return made


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="p", max_tokens=7, stream=True, **fields)


def test_by_default_decode_gets_what_prefill_answers():
    made, asked = backend(), request()
    prefill = made.prepare_prefill_request(request=asked, peer=None)
    assert (prefill.max_tokens, prefill.kv_transfer_params["do_remote_decode"]) == (1, True)
    assert HAND_OFF not in prefill.kv_transfer_params
    answer = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True, "raykv": [{}]})
    decode = made.prepare_decode_request(request=asked, peer=None, prefill_response=answer)
    assert decode.kv_transfer_params == answer.kv_transfer_params
    assert not made.concurrent_handoff


@pytest.mark.parametrize("fields", [{}, {"request_id": "x" * 1000}])
def test_a_concurrent_hand_off_gives_both_engines_one_id(fields: dict[str, Any]):
    made, asked, other = backend(concurrent_hand_off=True), request(**fields), request()
    assert made.concurrent_handoff
    prefill = made.prepare_prefill_request(request=asked, peer=None)
    decode = made.prepare_decode_request(request=asked, peer=None, prefill_response=None)
    hand_off = prefill.kv_transfer_params[HAND_OFF]
    assert decode.kv_transfer_params == {"do_remote_prefill": True, HAND_OFF: hand_off}
    assert 0 < len(hand_off) <= MAX_HAND_OFF
    assert (prefill.max_tokens, decode.max_tokens) == (1, 7)
    assert made.prepare_prefill_request(request=other, peer=None).kv_transfer_params[HAND_OFF] != hand_off


def test_a_wrong_value_is_refused():
    with pytest.raises(raykv.ConfigError, match=r"'concurrent_hand_off'.*give true or false"):
        backend(concurrent_hand_off="yes")
