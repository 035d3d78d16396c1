"""The compiled checksum must equal that of the xxhash package."""

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.memory import native
from raykv.memory.copying import CopyThreads
from tests.support.copies import gather_hashed

pytestmark = pytest.mark.usefixtures("loops")
EDGES = [64 * n + d for n in (3, 4, 15, 16, 17, 32, 255, 256, 257) for d in (-1, 0, 1)]


@pytest.fixture(params=[True, False])
def width(request):
    """Run a test with and without AVX2. The run with AVX2 is skipped if the processor or the loops do not have AVX2."""
    loops = native.loops
    if request.param and (loops is None or not loops.avx2(True)):
        pytest.skip("no AVX2 here")
    if loops is not None:
        loops.avx2(request.param)
    yield
    if loops is not None:
        loops.avx2(True)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("stream", [False, True])
def test_every_length_at_the_edges(rng, stream):
    """Lengths near the sizes in hash.c (stripe, block and TURN), and near 240, where XXH3 changes its algorithm."""
    for nbytes in sorted({*EDGES, *range(236, 300), 16 << 10, (16 << 10) + 1, 100_000, 1 << 20, (1 << 20) + 77}):
        source, target = bytearray(rng.randbytes(nbytes + 64)), bytearray(nbytes + 64)
        for before in (0, 1, 32):
            place = memoryview(target)[before : before + nbytes]
            assert gather_hashed(
                place, [memoryview(source)[7 : 7 + nbytes]], stream=stream
            ) == xxhash.xxh3_64_intdigest(source[7 : 7 + nbytes]), nbytes
            assert place == source[7 : 7 + nbytes]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_pieces_of_any_length(lengths, random):
    pieces = [random.randbytes(length) for length in lengths]
    target = bytearray(sum(lengths))
    assert gather_hashed(memoryview(target), [memoryview(piece) for piece in pieces]) == xxhash.xxh3_64_intdigest(
        b"".join(pieces)
    )
    assert target == b"".join(pieces)


@pytest.mark.parametrize("nbytes", [1, 240, 241, 70_000])
def test_a_batch_is_filled(rng, nbytes):
    threads = CopyThreads(2)
    values = [[rng.randbytes(nbytes)] for _ in range(40)]
    slots = [memoryview(bytearray(nbytes)) for _ in values]
    checksums = threads.fill(slots, [[memoryview(piece) for piece in value] for value in values])
    assert [bytes(slot) for slot in slots] == [value[0] for value in values]
    assert checksums.tolist() == [xxhash.xxh3_64_intdigest(value[0]) for value in values]
    with pytest.raises(ValueError, match=r"slot|structures|broadcast"):
        threads.fill(slots, [[memoryview(bytes(nbytes + 1))] for _ in values])
    threads.close()
