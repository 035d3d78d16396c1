"""Wrong reuse is impossible by construction: where KV could differ, the keys differ, or the engine is refused."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.torch import save_file  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)

import raykv  # noqa: E402
from raykv.errors import ConfigError  # noqa: E402
from raykv.integrations.vllm.checks import check_cache, check_engine  # noqa: E402
from raykv.integrations.vllm.config import ConnectorConfig  # noqa: E402
from raykv.integrations.vllm.connection import Connection  # noqa: E402
from raykv.integrations.vllm.groups import Groups  # noqa: E402
from raykv.integrations.vllm.lookups import Lookups, Prompt, hand_off_deadline  # noqa: E402
from raykv.integrations.vllm.metadata import Scope  # noqa: E402
from raykv.integrations.vllm.namespace import Scopes, namespace_of  # noqa: E402
from raykv.integrations.vllm.revision import content_digest  # noqa: E402
from raykv.integrations.vllm.tensor_ranks import tensor_ranks  # noqa: E402
from raykv.protocol.chunk_keys import named  # noqa: E402
from raykv.protocol.namespace import Namespace  # noqa: E402

pytestmark = pytest.mark.vllm


def write_model(folder: Path, *, seed: int = 0, tensors: int = 4, name: str = "model.safetensors") -> Path:
    """Write a model whose weights are so large that the digest reads only samples of them."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    save_file({f"w.{n}": torch.randn(64, 2048, generator=draw) for n in range(tensors)}, folder / name)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}))
    return folder


def engine(model: Path | str, **changes: Any) -> Any:
    """Make the parts of a VllmConfig that the namespace reads. `changes` name fields as "part__field"."""
    parts = {
        "model_config": {
            "model": str(model),
            "dtype": torch.bfloat16,
            "quantization": None,
            "runner_type": "generate",
            "multimodal_config": None,
            "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "_name_or_path": str(model)}),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256",
            "enable_prefix_caching": False,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "load_config": {"load_format": "auto"},
        "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        assert field in parts[part]
        parts[part][field] = value
    return SimpleNamespace(
        **{part: SimpleNamespace(**fields) for part, fields in parts.items()},
        num_lookahead_tokens=0,
        speculative_config=None,
    )


def media(**fields: Any) -> Any:
    """Make a multimodal configuration."""
    return SimpleNamespace(**{"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, **fields})


def attention(kind: type = FullAttentionSpec, **fields: Any) -> Any:
    return kind(**{"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, **fields})


def window() -> Any:
    return attention(SlidingWindowSpec, sliding_window=64)


def state(mode: str) -> Any:
    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.bfloat16,), mamba_cache_mode=mode)


def cache(specs: list[Any]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{place}"], spec) for place, spec in enumerate(specs)],
    )


def namespace(vllm_config: Any, *, config: ConnectorConfig | None = None, **changes: Any) -> Namespace:
    known = {
        "rank": (0, 0),
        "tensor_ranks": vllm_config.parallel_config.tensor_parallel_size,
        "block_tokens": [32],
        "layout": "2x[2, 32, 64]/123/bfloat16",
        "attention": "CPU_ATTN/amx",
    }
    return namespace_of(vllm_config, config or ConnectorConfig(), **{**known, **changes})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "first" / "toy")


def test_the_same_files_elsewhere_are_the_same_namespace(model: Path, tmp_path: Path):
    copy = Path(shutil.copytree(model, tmp_path / "other host" / "toy"))
    assert namespace(engine(copy)).digest == namespace(engine(model)).digest


def test_two_models_of_equal_shape_differ(model: Path, tmp_path: Path):
    other = write_model(tmp_path / "second" / "toy", seed=1)
    assert namespace(engine(model)).differences(namespace(engine(other))) == ["revision"]


def test_one_retrained_tensor_is_another_revision(model: Path):
    before = content_digest(model)
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-64 * 2048 * 4] ^= 1  # first byte of the last tensor
    path.write_bytes(raw)
    assert content_digest(model) != before


def test_what_is_no_weight_is_no_revision(model: Path):
    before = content_digest(model)
    (model / "README.md").write_text("edited")
    assert content_digest(model) == before


def test_a_file_of_an_unknown_format_is_sampled_throughout(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20))
    before = content_digest(path)
    path.write_bytes(bytes(2 << 20) + bytes(1 << 20).replace(b"\0", b"\1"))
    assert content_digest(path) != before


def test_a_model_that_cannot_be_identified_is_refused_until_its_revision_is_stated():
    with pytest.raises(ConfigError, match="'revision'"):
        namespace(engine("s3://bucket/model"))
    stated = [namespace(engine("s3://bucket/model"), config=ConnectorConfig(revision=one)) for one in ("1", "2")]
    assert stated[0].differences(stated[1]) == ["revision"]


def test_a_commit_of_the_hub_is_a_revision():
    hub = SimpleNamespace(to_dict=dict, _commit_hash="abc")
    assert namespace(engine("org/model", model_config__hf_config=hub)).revision == "commit:abc"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dtype", {"model_config__dtype": torch.float16}),
        ("dtype", {"cache_config__cache_dtype": "fp8"}),
        ("extra", {"model_config__quantization": "awq"}),
        ("extra", {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 1e6})}),
        ("revision", {"load_config__load_format": "dummy"}),
        ("tp_size", {"parallel_config__tensor_parallel_size": 2}),
        ("pp_size", {"parallel_config__pipeline_parallel_size": 2}),
        ("hash_algorithm", {"cache_config__prefix_caching_hash_algo": "sha256_cbor"}),
    ],
)
def test_every_condition_of_the_engine_counts(model: Path, field: str, changes: dict[str, Any]):
    assert namespace(engine(model)).differences(namespace(engine(model, **changes))) == [field]


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        (["tp_rank"], {"rank": (0, 1)}),
        (["pp_rank"], {"rank": (1, 0)}),
        (["layout"], {"layout": "2x[2, 32, 64]/213/bfloat16"}),
        (["attention_backend"], {"attention": "CPU_ATTN/vec"}),
        (["chunk_tokens", "extra"], {"block_tokens": [64]}),
        (["chunk_tokens"], {"config": ConnectorConfig(chunk_blocks=2)}),
        (["extra"], {"block_tokens": [32, 32]}),
    ],
)
def test_every_condition_of_the_worker_counts(model: Path, fields: list[str], changes: dict[str, Any]):
    assert namespace(engine(model)).differences(namespace(engine(model), **changes)) == fields


def test_the_name_of_a_model_counts():
    models = [namespace(engine(name), config=ConnectorConfig(revision="1")) for name in ("org/first", "org/second")]
    assert models[0].differences(models[1]) == ["model"]


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "unix:/dev/shm/raykv-default-other.sock"},
        {"address": "first.host:7000"},
        {"address": "first.host:7001"},
        {"address": "second.host:7000"},
        {"lookup_timeout_s": 1.0, "load_timeout_s": 1.0, "store_timeout_s": 1.0},
        {"load_threads": 1},
        {"store_decode": False},
        {"load_policy": "always"},
    ],
    ids=str,
)
def test_what_leaves_the_bytes_as_they_are_does_not_count(model: Path, fields: dict[str, Any]):
    """Engines share chunks even if their nodes, timeouts, threads and load policies differ."""
    assert namespace(engine(model), config=ConnectorConfig(**fields)).digest == namespace(engine(model)).digest


def test_conditions_and_scopes_never_share_a_key(model: Path, tmp_path: Path):
    """Compares all pairs, not only each condition with the plain one."""
    plain = namespace(engine(model))
    adapter = write_model(tmp_path / "adapter", name="adapter_model.safetensors")
    scopes = [Scopes().of(each) for each in (request(), request(salt="x"), request(lora=("x", adapter)))]
    conditions = [
        plain,
        namespace(engine(write_model(tmp_path / "retrained" / "toy", seed=1))),
        namespace(engine(model), config=ConnectorConfig(revision="1")),
        namespace(engine(model, model_config__dtype=torch.float16)),
        namespace(engine(model, cache_config__cache_dtype="fp8")),
        namespace(engine(model, cache_config__prefix_caching_hash_algo="sha256_cbor")),
        *(namespace(engine(model, parallel_config__tensor_parallel_size=2), rank=(0, rank)) for rank in range(2)),
        *(namespace(engine(model, parallel_config__pipeline_parallel_size=2), rank=(rank, 0)) for rank in range(2)),
        namespace(engine(model), block_tokens=[64]),
        namespace(engine(model), config=ConnectorConfig(chunk_blocks=2)),
        namespace(engine(model), block_tokens=[32, 32]),
    ]
    digests = [each.with_fields(lora=one.lora, salt=one.salt).digest for each in conditions for one in scopes]
    keys = {named(digest, [b"one hash"]).tobytes() for digest in digests}
    assert len(keys) == len(conditions) * len(scopes)


def test_groups_never_share_the_name_of_a_chunk():
    groups = Groups(cache([attention(), window(), state("align")]), 1)
    hashes = [bytes([number]) * 32 for number in range(4)]
    names = {groups.name(group, hashes, end) for group in groups.each for end in (32, 64, 96, 128)}
    assert len(names) == 3 * 4


def test_a_hash_that_starts_at_random_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    random_seed = engine(model, cache_config__prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"prefix_caching_hash_algo='xxhash'.*PYTHONHASHSEED"):
        namespace(random_seed)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = namespace(random_seed)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert namespace(random_seed).differences(first) == ["hash_algorithm"]


def request(*, salt: str | None = None, lora: tuple[str, Path | str] | None = None) -> Any:
    adapter = None if lora is None else SimpleNamespace(lora_name=lora[0], lora_path=str(lora[1]))
    return SimpleNamespace(cache_salt=salt, lora_request=adapter)


def test_salts_and_adapters_share_nothing_though_they_share_an_account(model: Path, tmp_path: Path):
    adapters = [write_model(tmp_path / name, seed=n, name="adapter_model.safetensors") for n, name in enumerate("ab")]
    requests = [
        request(),
        request(salt="tenant one"),
        request(salt="tenant two"),
        request(lora=("x", adapters[0])),
        request(lora=("y", adapters[0])),
        request(lora=("x", adapters[1])),
        request(lora=("x", "hub/adapter")),
        request(lora=("x", adapters[0]), salt="tenant one"),
    ]
    scopes = Scopes()
    base = namespace(engine(model))
    names = [base.with_fields(lora=one.lora, salt=one.salt) for one in map(scopes.of, requests)]
    assert len({name.digest for name in names}) == len(requests)
    assert {name.group.digest for name in names} == {base.digest}
    with raykv.embedded(arena_nbytes="64 MiB") as cluster:
        clients = [cluster.client(name) for name in names]
        for number, client in enumerate(clients):
            assert client.put([b"a prefix"], [bytes([number]) * 4096]).stored == 1
        for number, client in enumerate(clients):
            into = bytearray(4096)
            assert client.get([b"a prefix"], [into]).prefix == 1
            assert into == bytes([number]) * 4096


def test_an_adapter_that_was_trained_further_in_place_is_another(tmp_path: Path):
    adapter = write_model(tmp_path / "adapter", name="adapter_model.safetensors")
    scopes = Scopes()
    before = scopes.of(request(lora=("x", adapter)))
    assert scopes.of(request(lora=("x", adapter))) == before
    shutil.rmtree(adapter)
    write_model(tmp_path / "adapter", seed=1, name="adapter_model.safetensors")
    after = scopes.of(request(lora=("x", adapter)))
    assert after != before
    assert scopes.of(request(lora=("x", adapter))) == after
    # It is unknown whether this engine has loaded the new files, so no other engine may share its chunks.
    assert after != Scopes().of(request(lora=("x", adapter)))


def test_an_adapter_that_is_not_here_shares_with_its_process_alone():
    scopes = Scopes()
    mine = scopes.of(request(lora=("x", "somebody/adapter")))
    assert scopes.of(request(lora=("x", "somebody/adapter"))) == mine
    assert Scopes().of(request(lora=("x", "somebody/adapter"))) != mine


def test_a_fetched_adapter_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    adapter = write_model(tmp_path / "snapshot", name="adapter_model.safetensors")
    monkeypatch.setattr(
        "raykv.integrations.vllm.namespace.snapshot_download", lambda name, *, local_files_only: str(adapter)
    )
    fetched = Scopes().of(request(lora=("x", "somebody/adapter")))
    assert fetched == Scopes().of(request(lora=("x", adapter)))


def test_engines_that_prepare_images_differently_do_not_share(model: Path):
    plain = namespace(engine(model, model_config__multimodal_config=media()))
    other = namespace(engine(model, model_config__multimodal_config=media(mm_processor_kwargs={"do_rescale": False})))
    assert plain.differences(other) == ["extra"]
    assert plain.digest != namespace(engine(model)).digest
    check_engine(engine(model, model_config__multimodal_config=media()))
    check_engine(
        engine(
            model,
            model_config__multimodal_config=media(mm_processor_cache_gb=0),
            cache_config__enable_prefix_caching=True,
        )
    )


def test_an_adapter_that_cannot_be_read_shares_with_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreadable(_: Path) -> str:
        raise PermissionError

    adapter = write_model(tmp_path / "adapter", name="adapter_model.safetensors")
    monkeypatch.setattr("raykv.integrations.vllm.namespace.content_digest", unreadable)
    scopes = Scopes()
    assert scopes.of(request(lora=("x", adapter))) != scopes.of(request(lora=("x", adapter)))


@pytest.mark.parametrize(
    "header", [b"\xff" * 8, (9).to_bytes(8, "little") + b"{not json", (2).to_bytes(8, "little") + b"[]"]
)
def test_a_broken_safetensors_file_is_sampled_like_any_other(tmp_path: Path, header: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(3 << 20))
    before = content_digest(path)
    path.write_bytes(header + bytes(2 << 20) + b"\1" * (1 << 20))
    assert content_digest(path) != before


def test_a_salt_is_not_in_what_is_logged():
    assert "secret" not in repr(Scopes().of(request(salt="secret")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "kv_load_failure_policy.*'recompute'"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"model_config__multimodal_config": media(mm_processor_cache_gb=0)}, "mm_processor_cache_gb=0"),
    ],
)
def test_an_engine_that_could_fail_a_request_or_be_wrong_is_refused(changes: dict[str, Any], says: str):
    check_engine(engine("any"))
    with pytest.raises(ConfigError, match=says):
        check_engine(engine("any", **changes))


@pytest.mark.parametrize(
    ("specs", "changes", "says"),
    [
        ([attention(), attention(RSWASpec, rswa_window=64)], {}, "KV cache of RSWASpec is not supported"),
        ([attention(), window()], {"enable_prefix_caching": False}, "set enable_prefix_caching=True"),
        ([attention(), window()], {"chunk_blocks": 2}, "field 'chunk_blocks': 2.*block_size"),
        ([window()], {"chunk_blocks": 2}, "field 'chunk_blocks'"),
        ([attention(), state("none")], {}, "mamba_cache_mode='align'"),
        ([attention(non_causal=True)], {}, "later tokens"),
    ],
)
def test_a_cache_whose_blocks_cannot_be_reused_is_refused(specs: list[Any], changes: dict[str, Any], says: str):
    fields = {"enable_prefix_caching": True, "chunk_blocks": 1, **changes}
    config = ConnectorConfig(chunk_blocks=fields["chunk_blocks"])
    vllm_config = engine("any", cache_config__enable_prefix_caching=fields["enable_prefix_caching"])
    with pytest.raises(ConfigError, match=says):
        check_cache(vllm_config, cache(specs), config)


@pytest.mark.parametrize("specs", [[attention()], [window()], [attention(), window(), state("align")]])
def test_a_cache_of_known_groups_is_accepted(specs: list[Any]):
    check_cache(engine("any", cache_config__enable_prefix_caching=True), cache(specs), ConnectorConfig())


def test_ranks_with_the_same_bytes_share_a_namespace_of_a_smaller_engine(model: Path):
    """For example, two tensor ranks with latents (MLA) store the same as an engine with one rank."""
    both = engine(model, parallel_config__tensor_parallel_size=2)
    assert namespace(both, tensor_ranks=1).digest == namespace(engine(model)).digest
    assert namespace(both).differences(namespace(engine(model))) == ["tp_size"]


def latents(**fields: Any) -> Any:
    return attention(MLAAttentionSpec, num_kv_heads=1, max_tp_shards=1, **fields)


def ranks_of(
    size: int, store_tp_size: int | None, *specs: Any, replicas: int = 1, draft_size: int | None = None
) -> Any:
    """Return the ranks under which an engine of this tensor parallel size stores its KV."""
    made, layers = engine("any", parallel_config__tensor_parallel_size=size), cache(list(specs))
    layers.kv_tp_replicas = replicas
    if draft_size:
        made.num_lookahead_tokens = 1
        draft = SimpleNamespace(tensor_parallel_size=draft_size)
        made.speculative_config = SimpleNamespace(draft_parallel_config=draft)
    return tensor_ranks(made, layers, ConnectorConfig(store_tp_size=store_tp_size))


def test_engines_of_other_sizes_store_under_the_same_ranks():
    """With 8 KV heads, an engine with 1, 2 or 4 ranks stores as an engine with 4 ranks does."""
    for size in (1, 2, 4):
        ranks = ranks_of(size, 4, attention(num_kv_heads=8 // size), window_of(8 // size), draft_size=size)
        assert ranks.count == 4
        assert [rank for worker in range(size) for rank in ranks.of(worker)] == [0, 1, 2, 3]
        assert {ranks.replica(worker) for worker in range(size)} == {(0, 1)}


def window_of(heads: int) -> Any:
    return attention(SlidingWindowSpec, sliding_window=64, num_kv_heads=heads)


@pytest.mark.parametrize("store_tp_size", [None, 4])
@pytest.mark.parametrize("specs", [[attention()], [attention(), state("align")], [attention(num_head_slots=2)]])
def test_by_default_each_rank_stores_for_itself(store_tp_size: int | None, specs: list[Any]):
    ranks = ranks_of(4, store_tp_size, *specs)
    assert [list(ranks.of(worker)) for worker in range(4)] == [[0], [1], [2], [3]]
    assert (ranks.count, ranks.replica(3)) == (4, (0, 1))


@pytest.mark.parametrize("store_tp_size", [None, 1, 2, 4, 16])
def test_latents_are_stored_once_whatever_the_sizes(store_tp_size: int | None):
    for size in (1, 4):
        ranks = ranks_of(size, store_tp_size, latents(), replicas=size)
        assert ranks.count == 1
        assert {tuple(ranks.of(worker)) for worker in range(size)} == {(0,)}
        assert [ranks.replica(worker) for worker in range(size)] == [(worker, size) for worker in range(size)]


@pytest.mark.parametrize(
    ("size", "store_tp_size", "specs", "says"),
    [
        (1, 3, [attention(num_kv_heads=2)], "a layer has 2 KV heads; set a divisor"),
        (2, 3, [attention(num_kv_heads=4)], "tensor_parallel_size is 2; set the largest tensor_parallel_size"),
        (4, 2, [attention(num_kv_heads=4)], "tensor_parallel_size is 4; set the largest tensor_parallel_size"),
        (2, 4, [attention(num_kv_heads=1)], "a layer has at most 2 KV heads"),
        (2, 4, [attention(num_kv_heads=4), window_of(3)], "a layer has 6 KV heads"),
        (1, 2, [attention(), state("align")], r"not divided by heads \(MambaSpec\); leave it out"),
        (1, 2, [attention(), latents()], r"not divided by heads \(MLAAttentionSpec\)"),
        (1, 2, [attention(num_head_slots=4)], "packs heads or scales"),
        (1, 2, [attention(state_content_bytes=72)], "packs heads or scales"),
        (1, 2, [attention(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)], "packs heads or scales"),
    ],
)
def test_kv_that_cannot_be_divided_is_refused_by_name(size: int, store_tp_size: int, specs: list[Any], says: str):
    with pytest.raises(ConfigError, match=f"field 'store_tp_size': {store_tp_size}, but .*{says}"):
        ranks_of(size, store_tp_size, *specs)


def test_a_drafter_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size is 1; set both to 2"):
        ranks_of(2, 4, attention(num_kv_heads=4), draft_size=1)


def test_a_ticket_of_an_engine_that_stores_under_other_ranks_is_refused_by_name():
    hashes = [bytes([number]) * 32 for number in range(4)]
    spaces = {size: {(0, rank): rank_of(rank, size) for rank in range(size)} for size in (1, 2)}
    with raykv.embedded(arena_nbytes="64 MiB") as cluster:
        lookups = {
            size: Lookups(
                ConnectorConfig(),
                Groups(cache([attention()]), 1),
                Connection(partial(cluster.client, here[0, 0])),
                here,
            )
            for size, here in spaces.items()
        }
        asked = Prompt(hashes, 0, 127)
        for size, other in ((1, 2), (2, 1)):
            tickets = lookups[size].tickets(Scope(), hashes, 128, found=[], computed=0, deadline_s=hand_off_deadline())
            assert lookups[size].redeem(Scope(), asked, tickets).hit.tokens == 0
            with pytest.raises(raykv.NamespaceMismatch, match=rf"{size} tensor ranks.*under {other}.*'store_tp_size'"):
                lookups[other].redeem(Scope(), asked, tickets)
        for each in lookups.values():
            each.close()


def rank_of(rank: int, size: int) -> Namespace:
    return Namespace(model="toy", tp_rank=rank, tp_size=size)


def test_a_drafter_with_kv_is_part_of_the_namespace(model: Path, tmp_path: Path):
    def drafting(path: Path, *, tokens: int) -> Any:
        made = engine(model)
        made.num_lookahead_tokens = tokens
        made.speculative_config = SimpleNamespace(method="draft_model", draft_model_config=engine(path).model_config)
        return made

    first, second = (write_model(tmp_path / name / "draft", seed=seed) for name, seed in (("a", 5), ("b", 6)))
    assert namespace(drafting(first, tokens=3)).differences(namespace(drafting(second, tokens=3))) == ["revision"]
    assert namespace(drafting(first, tokens=3)).differences(namespace(engine(model))) == ["revision", "extra"]
    assert namespace(drafting(first, tokens=0)).digest == namespace(engine(model)).digest
    stated = [namespace(drafting(each, tokens=3), config=ConnectorConfig(revision="7")) for each in (first, second)]
    assert {each.revision for each in stated} == {"stated:7"}  # one revision for both models


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"unknown field 'chunk_block'; ConnectorConfig has: .*chunk_blocks"):
        ConnectorConfig.load({"chunk_block": 2})
