"""Compares the bytes of a block with torch's own indexing for every order of the axes. Needs no engine."""

import itertools
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from raykv.errors import ConfigError  # noqa: E402
from raykv.integrations.kv_layout import DeviceLayout, Layout, layout_of, part_of, runs_of, stacked  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 10
AXES = "LBHNC"
ORDERS = ["".join(order) + "C" for order in itertools.permutations(AXES[:4])]
"""Orders of layers, blocks, heads and tokens in memory, including vLLM's. The content is always the last axis."""
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


def cut(layers: dict[str, torch.Tensor], order: str, number: int, parts: int) -> dict[str, torch.Tensor]:
    """Divide the heads into `parts` equal parts. Copy part `number` into new layers with axes in `order`."""
    blocks, heads, tokens, content = next(iter(layers.values())).shape
    shape, few = dict(zip(AXES, (len(layers), blocks, heads // parts, tokens, content), strict=True)), heads // parts
    empty = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
    mine = dict(zip(layers, empty.permute([order.index(axis) for axis in AXES]), strict=True))
    for name, layer in layers.items():
        mine[name].copy_(layer[:, number * few : (number + 1) * few])
    return mine


def random_caches(order: str, rng: random.Random) -> tuple[dict[str, torch.Tensor], int]:
    """Make layers of a random shape. Also returns a random number of equal parts into which their heads divide."""
    parts, few = rng.choice([2, 3, 4]), rng.choice([1, 2])
    sizes = (rng.randint(1, 3), BLOCKS, parts * few, rng.choice([1, 4, 16]), rng.choice([2, 10]))
    shape = dict(zip(AXES, sizes, strict=True))
    physical = torch.empty([shape[axis] for axis in order], dtype=torch.bfloat16)
    physical.view(torch.int16).random_(generator=torch.Generator().manual_seed(rng.randrange(100)))
    views = physical.permute([order.index(axis) for axis in AXES])
    return {f"layer.{number}": view for number, view in enumerate(views)}, parts


@pytest.mark.parametrize("kind", ["cpu", "device"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_part_of_the_heads_is_what_a_worker_with_these_heads_has(order: str, kind: str):
    """For this part, the two workers share chunks: their layouts have equal descriptions and read equal bytes."""
    seed = random.randrange(1 << 30)
    rng, make = random.Random(seed), Layout if kind == "cpu" else DeviceLayout
    for _ in range(4):
        layers, parts = random_caches(order, rng)
        blocks = [rng.sample(range(BLOCKS), 2) for _ in range(2)]
        for number in range(parts):
            few = make(cut(layers, order, number, parts), BLOCKS, 2)
            mine = make({name: part_of(name, layer, (number, parts)) for name, layer in layers.items()}, BLOCKS, 2)
            assert (mine.description, mine.chunk_nbytes) == (few.description, few.chunk_nbytes), f"seed {seed}"
            for chunk in blocks:
                assert b"".join(mine.read([chunk])[0]) == b"".join(few.read([chunk])[0]), f"seed {seed}"
        before = {name: layer.clone() for name, layer in layers.items()}
        number, (source, target) = rng.randrange(parts), rng.sample(range(BLOCKS), 2)
        mine = make({name: part_of(name, layer, (number, parts)) for name, layer in layers.items()}, BLOCKS, 1)
        carry(mine, [source], [target])
        for name, layer in layers.items():
            old, heads = before[name], layer.shape[1] // parts
            old[target, number * heads : (number + 1) * heads] = old[source, number * heads : (number + 1) * heads]
            assert bits(layer) == bits(old), f"seed {seed}: only these heads of this block have changed"


def test_a_device_copies_the_runs_of_a_cut_layer_at_once():
    layers = {name: part_of(name, layer, (1, 2)) for name, layer in caches("LBNHC").items()}
    runs = [run for name, layer in layers.items() for run in runs_of(name, layer, BLOCKS)]
    assert len(runs) == LAYERS * TOKENS
    assert len(stacked(runs)) < LAYERS * TOKENS / 2
    assert [len(stacked([run])) for run in runs] == [1] * len(runs)


@pytest.mark.parametrize(
    ("cache", "parts"), [(torch.zeros(7, 2, 4, 2), 4), (torch.zeros(7, 4), 2), (torch.zeros(7, 1, 4, 2), 2)]
)
def test_a_layer_without_enough_heads_is_not_divided(cache: torch.Tensor, parts: int):
    with pytest.raises(ConfigError, match=rf"layer odd.*no heads to divide into {parts} parts.*store_tp_size"):
        layout_of({"odd": cache}, 7, 1, part=(0, parts))


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
