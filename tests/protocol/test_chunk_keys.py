"""Keys commit to their namespace and to every token up to the end of their chunk."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace

DIGEST = Namespace(model="m").digest
tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


@given(tokens, st.integers(1, 8))
def test_a_chain_has_a_key_for_each_full_chunk(prompt, chunk_tokens):
    """The keys equal those of a second implementation, which hashes plain bytes, one chunk at a time."""
    expected, parent = [], b""
    for start in range(0, len(prompt) - chunk_tokens + 1, chunk_tokens):
        raw = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + chunk_tokens])
        parent = hashlib.blake2b(raw + parent, digest_size=16, key=DIGEST, person=b"raykv-chain").digest()
        expected.append(parent)
    keys = chunk_keys.chain(DIGEST, prompt, chunk_tokens)
    assert keys.shape == (len(prompt) // chunk_tokens, 2)
    assert [chunk_keys.to_bytes(key) for key in keys] == expected


@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_the_prompts_do(left, right):
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    one, other = chunk_keys.chain(DIGEST, left, 3).tolist(), chunk_keys.chain(DIGEST, right, 3).tolist()
    assert one[: common // 3] == other[: common // 3]
    assert not {tuple(key) for key in one[common // 3 :]} & {tuple(key) for key in other}


@given(tokens, st.integers(0, 10))
def test_a_chain_can_be_continued(prompt, chunks):
    whole = chunk_keys.chain(DIGEST, prompt, 2)
    head = whole[:chunks]
    parent = chunk_keys.to_bytes(head[-1:])
    rest = chunk_keys.chain(DIGEST, prompt[2 * len(head) :], 2, parent=parent)
    assert [*head.tolist(), *rest.tolist()] == whole.tolist()


def test_arrays_of_any_kind_of_integer_give_the_same_keys():
    for kind in (np.int32, np.int64, np.uint16, np.uint32):
        assert (
            chunk_keys.chain(DIGEST, np.arange(9, dtype=kind), 4) == chunk_keys.chain(DIGEST, list(range(9)), 4)
        ).all()


@pytest.mark.parametrize(
    ("prompt", "chunk_tokens", "words"),
    [([1], 0, "chunk_tokens"), ([-1], 1, "token ids"), ([1 << 32], 1, "token ids"), ([[1, 2]], 1, "flat list")],
)
def test_prompts_that_are_none(prompt, chunk_tokens, words):
    with pytest.raises(UsageError, match=words):
        chunk_keys.chain(DIGEST, prompt, chunk_tokens)


def test_names_of_any_length_and_text_as_utf8():
    names = ["", "a", "a" * 1000, "ä", b"\x00", b"\x00\x00"]
    keys = chunk_keys.named(DIGEST, names)
    assert len({tuple(key) for key in keys.tolist()}) == len(names)
    assert (chunk_keys.named(DIGEST, ["ä"]) == chunk_keys.named(DIGEST, ["ä".encode()])).all()


def test_names_and_chains_never_meet():
    raw = np.arange(4, dtype="<u4").tobytes()
    assert chunk_keys.named(DIGEST, [raw]).tolist() != chunk_keys.chain(DIGEST, range(4), 4).tolist()


def test_these_keys_never_change():
    """These keys must not change, because other keys for the same tokens would silently empty every cache."""
    assert chunk_keys.to_bytes(chunk_keys.named(bytes(16), ["a"])).hex() == "62f2bf654ca4131087628dd71b43f2df"
    assert (
        chunk_keys.to_bytes(chunk_keys.chain(bytes(16), [1, 2, 3, 4], 2)).hex()
        == "3be0d55451f41680e8fe7bad6fb3bab7866c27e87434ff003f9896f46f6a450b"
    )
    assert Namespace(model="m").digest.hex() == "23e82a25215f8352190f46f54840ca40"


@given(st.lists(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 2), max_size=5))
def test_bytes_and_back(pairs):
    keys = np.array(pairs, np.uint64).reshape(-1, 2)
    raw = chunk_keys.to_bytes(keys)
    assert raw == b"".join(half.to_bytes(8, "little") for pair in pairs for half in pair)
    assert (chunk_keys.from_bytes(raw) == keys).all()
    with pytest.raises(UsageError):
        chunk_keys.from_bytes(raw + b"x")


@pytest.mark.parametrize("length", [1, 15, 17, 32])
def test_a_parent_of_the_wrong_length_is_refused(length):
    with pytest.raises(UsageError, match=f"'parent': {length} bytes"):
        chunk_keys.chain(bytes(16), [1, 2], 1, parent=bytes(length))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_unique_keys(halves):
    keys = np.array(halves, np.uint64).reshape(-1, 2)
    found = [tuple(key) for key in chunk_keys.unique(keys).tolist()]
    assert sorted(found) == sorted(set(halves))
