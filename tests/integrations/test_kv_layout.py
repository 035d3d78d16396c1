"""The bytes of a block, compared with torch's own indexing for every order of the axes. Needs no engine."""

import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from raykv.errors import ConfigError  # noqa: E402
from raykv.integrations.kv_layout import DeviceLayout, Layout, layout_of, runs_of  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 10
AXES = "LBHNC"
ORDERS = ["".join(order) + "C" for order in itertools.permutations(AXES[:4])]
"""Orders of layers, blocks, heads and tokens in memory, among them vLLM's. In all, the content is the last axis."""
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT * 2


def caches(order: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Make the layers of a KV cache, each [blocks, heads, tokens, content], in one allocation with axes in `order`."""
    logical = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    physical = torch.empty([logical[AXES.index(axis)] for axis in order], dtype=dtype)
    physical.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    inverse = [order.index(axis) for axis in AXES]
    return {f"layer.{number}": view for number, view in enumerate(physical.permute(inverse))}


def built(kind: type[Layout], layers: dict[str, torch.Tensor], chunk_blocks: int) -> Layout:
    return kind(layers, BLOCKS, chunk_blocks)


def bits(block: torch.Tensor) -> list[int]:
    return block.contiguous().view(torch.int16).flatten().tolist()


def carry(layout: Layout, source: list[int], target: list[int | None]) -> None:
    chunk = b"".join(layout.read([source])[0])
    targets = layout.targets(target)
    assert sum(map(len, targets)) == len(chunk) == layout.chunk_nbytes
    start = 0
    for piece in targets:
        piece[:] = chunk[start : start + len(piece)]
        start += len(piece)
    layout.load([(target, targets)])


@pytest.mark.parametrize("kind", [Layout, DeviceLayout])
@pytest.mark.parametrize("order", ORDERS)
def test_a_chunk_carries_exactly_its_blocks(order: str, kind: type[Layout]):
    layers = caches(order)
    before = {name: [bits(block) for block in layer] for name, layer in layers.items()}
    carry(built(kind, layers, 3), [5, 1, 6], [0, None, 3])
    for name, layer in layers.items():
        old = before[name]
        assert [bits(block) for block in layer] == [old[5], old[1], old[2], old[6], old[4], old[5], old[6]]


def test_all_layers_of_a_block_are_one_run_where_blocks_are_outermost():
    assert len(built(Layout, caches("BLHNC"), 1).targets([0])) == 1
    assert len(built(Layout, caches("LBHNC"), 1).targets([0])) == LAYERS


@pytest.mark.parametrize("kind", [Layout, DeviceLayout])
def test_several_chunks_are_read_at_once(kind: type[Layout]):
    layers = caches("LBNHC")
    layout = built(kind, layers, 2)
    chunks = [[0, 3], [6, 1], [3, 2]]
    expected = [b"".join(layout.read([blocks])[0]) for blocks in chunks]
    assert [b"".join(views) for views in layout.read(chunks)] == expected
    assert len(set(expected)) == 3


def test_a_device_reads_a_bounded_number_of_chunks_at_once(monkeypatch: pytest.MonkeyPatch):
    assert built(DeviceLayout, caches("LBNHC"), 1).batch_chunks == 32
    monkeypatch.setattr("raykv.integrations.kv_layout.MAX_STAGED_NBYTES", 2 * BLOCK_BYTES)
    assert built(DeviceLayout, caches("LBNHC"), 1).batch_chunks == 2
    assert built(DeviceLayout, caches("LBNHC"), 7).batch_chunks == 1


def test_it_is_imported_without_torch_and_without_an_engine():
    code = "import sys; import raykv.integrations.kv_layout; print({'torch', 'vllm', 'ray'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_layers_that_share_a_tensor_are_taken_once():
    layers = caches("LBNHC")
    layers["shared"] = layers["layer.0"]
    assert built(Layout, layers, 1).chunk_nbytes == BLOCK_BYTES


def test_blocks_that_the_kernel_splits_are_carried_whole():
    whole = torch.arange(6 * 8 * 4, dtype=torch.int32).view(6, 1, 8, 4)
    layout = Layout({"layer": whole.view(12, 1, 4, 4)}, 6, 1)
    assert layout.chunk_nbytes == 8 * 4 * 4
    carry(layout, [4], [2])
    assert torch.equal(whole[2], whole[4])


def test_equal_descriptions_mean_equal_meaning_of_bytes():
    descriptions = {
        (order, dtype): built(Layout, caches(order, dtype), 1).description
        for order in ORDERS
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert descriptions["LBHNC", torch.bfloat16] == descriptions["BLHNC", torch.bfloat16]
    assert descriptions["LBHNC", torch.bfloat16] != descriptions["LBNHC", torch.bfloat16]
    assert descriptions["LBHNC", torch.bfloat16] != descriptions["LBHNC", torch.float16]


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (torch.zeros(5, 2, 4), "does not begin with 7 blocks"),
        (torch.zeros(1, 4).expand(7, 4).unsqueeze(1).expand(7, 3, 4), "overlap"),
        (torch.zeros(7, 4, 100).permute(0, 2, 1)[:, ::2], "pieces"),
    ],
)
def test_an_unknown_layout_is_refused_by_name(cache: torch.Tensor, says: str):
    with pytest.raises(ConfigError, match=rf"layer odd.*{says}"):
        runs_of("odd", cache, 7)


def test_a_worker_without_a_kv_cache_is_refused():
    with pytest.raises(ConfigError, match="no device"):
        layout_of({}, 7, 1)
