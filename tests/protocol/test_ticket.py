"""Tickets: what they contain, and what a forged ticket can do."""

import json

import pytest

from raykv.errors import ConfigError, NamespaceMismatch
from raykv.protocol.namespace import Namespace
from raykv.protocol.ticket import MAX_RUNS, Ticket
from raykv.types import Match

SPACE = Namespace(model="m", dtype="bfloat16", salt="tenant")


def test_a_ticket_survives_json_and_tells_the_holders():
    holders = ("a", "a", "b", "a")
    ticket = Ticket.of(SPACE, holders)
    again = Ticket.from_json(json.loads(json.dumps(ticket.to_json())))
    assert again == ticket
    assert [run.chunks for run in ticket.runs] == [2, 1, 1]
    for wanted in range(6):
        assert again.match(SPACE, wanted) == Match(min(4, wanted), holders[:wanted])


def test_a_ticket_may_leave_chunks_out():
    holders = ["a", None, None, "b"]
    ticket = Ticket.from_json(Ticket.of(SPACE, holders).to_json())
    assert ticket.holders(SPACE, 6) == [*holders, None, None]
    assert ticket.match(SPACE, 6) == Match(1, ("a",))


def test_an_empty_ticket():
    ticket = Ticket.from_json(Ticket.of(SPACE, ()).to_json())
    assert ticket.match(SPACE, 5) == Match(0)


def test_a_ticket_keeps_the_salt_to_itself():
    assert "tenant" not in json.dumps(Ticket.of(SPACE, ("a",)).to_json())


def test_another_namespace_is_refused_by_name():
    ticket = Ticket.of(SPACE, ("a",))
    with pytest.raises(NamespaceMismatch) as caught:
        ticket.match(SPACE.with_fields(dtype="float16", tp_rank=3, salt="secret"), 1)
    assert "dtype ('bfloat16' there, 'float16' here), tp_rank" in str(caught.value).replace("tp_rank (0", "tp_rank")
    assert "secret" not in str(caught.value)
    for fields in ({"salt": "other"}, {"lora": "x"}):
        with pytest.raises(NamespaceMismatch, match="salt or lora"):
            ticket.match(SPACE.with_fields(**fields), 1)


def test_more_runs_than_a_ticket_holds_are_left_out():
    ticket = Ticket.of(SPACE, [f"n{place % 2}" for place in range(MAX_RUNS + 10)])
    assert Ticket.from_json(ticket.to_json()).match(SPACE, 1000).count == MAX_RUNS


@pytest.mark.parametrize(
    "change",
    [
        None,
        [],
        "text",
        {},
        {"digest": "xyz"},
        {"digest": 5},
        {"runs": [{"node_id": "a" * 65, "chunks": 1}]},
        {"runs": [{"node_id": "a", "chunks": 0}]},
        {"runs": [{"node_id": "a", "chunks": 1 << 40}]},
        {"runs": [{"node_id": "a", "chunks": 1, "address": "evil:1"}]},
        {"runs": [{"node_id": "a", "chunks": 1}] * (MAX_RUNS + 1)},
        {"group": {"model": ""}},
        {"group": None},
        {"more": 1},
    ],
)
def test_what_is_no_ticket_is_refused(change):
    fields = {**Ticket.of(SPACE, ("a",)).to_json(), **change} if isinstance(change, dict) and change else change
    with pytest.raises(ConfigError):
        Ticket.from_json(fields)


def test_a_forged_ticket_costs_little():
    fields = Ticket.of(SPACE, ("a",)).to_json()
    fields["runs"] = [{"node_id": f"n{n}", "chunks": 1 << 24} for n in range(MAX_RUNS)]
    assert Ticket.from_json(fields).match(SPACE, 3) == Match(3, ("n0",) * 3)
