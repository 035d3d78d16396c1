"""Each message, encoded and decoded again."""

import math
import random

import msgspec
import pytest

from raykv.errors import ProtocolError
from raykv.protocol import codec, messages
from raykv.protocol.heat import MAX_REPORTED, HeatReport, HotPrefix
from raykv.protocol.placement import MAX_MEMBERS, View
from tests.support.protocol import EXAMPLES, VIEW


def decoded(raw: bytes) -> tuple[codec.Header, messages.Message]:
    header = codec.decode_header(raw[: codec.HEADER.size])
    assert header.length == len(raw) - codec.HEADER.size
    return header, codec.decode(raw[codec.HEADER.size :])


def test_every_kind_of_message_is_an_example():
    assert {type(message) for message in EXAMPLES} == set((messages.Request | messages.Answer).__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    header, back = decoded(codec.encode(message, 17, 5))
    assert (header.epoch, header.request_id, back) == (17, 5, message)
    defaults = {field.name: field.default for field in msgspec.structs.fields(message)}
    assert all(getattr(message, name) != default for name, default in defaults.items()), "a field has no value"


def test_every_cut_of_a_message_is_refused():
    for message in EXAMPLES:
        body = codec.encode(message, 0, 0)[codec.HEADER.size :]
        for stop in range(len(body)):
            with pytest.raises(ProtocolError):
                codec.decode(body[:stop])


def test_messages_with_a_byte_changed_are_messages_or_refused(rng: random.Random):
    for _ in range(3000):
        body = bytearray(codec.encode(rng.choice(EXAMPLES), 0, 0)[codec.HEADER.size :])
        body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            assert isinstance(codec.decode(body), messages.Message)
        except ProtocolError:
            pass


def test_reports_of_heat_that_are_not_valid_are_refused():
    wrong = [
        HeatReport(math.nan),
        HeatReport(-1.0),
        HeatReport(math.inf),
        HeatReport(1.0, (HotPrefix(b"short", 1.0, 1),)),
        HeatReport(1.0, (HotPrefix(bytes(1 << 20), 1.0, 1),)),
        HeatReport(1.0, (HotPrefix(bytes(16), math.nan, 1),)),
        HeatReport(1.0, (HotPrefix(bytes(16), 1.0, -1),)),
        HeatReport(1.0, (HotPrefix(bytes(16), 1.0, 1),) * (MAX_REPORTED + 1)),
    ]
    for report in wrong:
        with pytest.raises(ProtocolError):
            decoded(codec.encode(messages.Heartbeat(VIEW.members[0], 3, heat=report), 0, 0))


def test_the_secret_of_a_cluster_is_in_no_text():
    attached = messages.Attached("a", "h", "/t", "/arena", b"my-secret", True)
    for text in (repr(attached), str(attached), f"{attached!r}", repr([attached])):
        assert "my-secret" not in text
        assert "secret=b'set'" in text
        assert "arena='/arena'" in text


@pytest.mark.parametrize(
    "wrong",
    [{"incarnation": 1 << 63}, {"incarnation": -1}, {"weight": float("nan")}, {"weight": -1.0}, {"node_id": "x" * 65}],
    ids=str,
)
def test_members_with_impossible_fields_are_refused(wrong):
    """A view with such a member would end the heartbeat thread of every node, or give the member all keys."""
    view = View(1, (msgspec.structs.replace(VIEW.members[0], **wrong),))
    with pytest.raises(ProtocolError, match="members"):
        decoded(codec.encode(messages.ViewIs(view), 0, 0))


def test_a_view_with_very_many_members_is_refused():
    """The ring of n members takes 32 KiB * n of memory."""
    view = View(1, VIEW.members[:1] * (MAX_MEMBERS + 1))
    with pytest.raises(ProtocolError, match="length"):
        decoded(codec.encode(messages.ViewIs(view), 0, 0))
