"""Wrong reuse is impossible by construction: every field is part of every key."""

import pytest

from raykv.errors import ConfigError
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace

BASE = Namespace(model="m", dtype="bfloat16", chunk_tokens=16, tp_size=4, pp_size=4)
OTHER = {
    "model": "n",
    "revision": "r",
    "dtype": "float16",
    "layout": "l",
    "chunk_tokens": 32,
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
    "attention_backend": "b",
    "hash_algorithm": "h",
    "lora": "a",
    "salt": "s",
    "extra": {"k": "v"},
}


def test_all_fields_are_tested_here():
    assert set(OTHER) == set(Namespace.model_fields)


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_every_key(field):
    other = BASE.with_fields(**{field: OTHER[field]})
    assert other.digest != BASE.digest
    assert other.differences(BASE) == BASE.differences(other) == [field]
    for make in (lambda d: chunk_keys.named(d, map(str, range(50))), lambda d: chunk_keys.chain(d, range(50), 1)):
        ours, theirs = ({tuple(key) for key in make(space.digest).tolist()} for space in (BASE, other))
        assert len(ours) == len(theirs) == 50
        assert not ours & theirs


def test_no_two_of_many_share_a_digest():
    spaces = [BASE.with_fields(**{a: OTHER[a], b: OTHER[b]}) for a in OTHER for b in OTHER if a <= b]
    spaces += [BASE.with_fields(salt="ab", lora="c"), BASE.with_fields(salt="a", lora="bc")]
    spaces += [BASE.with_fields(extra={"a": "b"}), BASE.with_fields(extra={"a": "b", "c": ""})]
    assert len({space.digest for space in spaces}) == len(spaces)


def test_equal_namespaces_have_equal_digests():
    again = Namespace.model_validate_json(BASE.model_dump_json())
    assert again == BASE
    assert again.digest == BASE.digest
    one = BASE.with_fields(extra={"a": "1", "b": "2"})
    assert one.digest == BASE.with_fields(extra={"b": "2", "a": "1"}).digest


def test_salt_and_adapter_share_an_account_and_nothing_else_does():
    for field, value in OTHER.items():
        same = BASE.with_fields(**{field: value}).group == BASE.group
        assert same == (field in ("salt", "lora"))


@pytest.mark.parametrize(
    "fields", [{"model": ""}, {"chunk_tokens": 0}, {"tp_rank": -1}, {"colour": "red"}, {"extra": {"a": 1}}]
)
def test_fields_that_are_wrong_are_named(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        BASE.with_fields(**fields)
