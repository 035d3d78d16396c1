"""Wherever a stream stops, the repeated answer continues the stream, and the client sees one whole answer."""

import pytest

from raykv.integrations.serve.resume import AnswerDiffers, Resumption
from tests.support.streams import WORDS, chat, event, parsed, text


def rest(sent: list[str], again: list[str]) -> list[str]:
    resumption = Resumption(sent)
    return [new for new in map(resumption.rest, again) if new is not None]


@pytest.mark.parametrize("cut", range(len(WORDS) + 3))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stream_cut_anywhere_and_repeated_in_other_pieces_is_whole(cut: int, size: int):
    whole = chat(WORDS)
    joined = "".join(WORDS)
    again = chat([joined[start : start + size] for start in range(0, len(joined), size)], name="another")
    seen = [*whole[:cut], *rest(whole[:cut], again)]
    assert text(seen) == joined
    assert [one["usage"] for one in parsed(seen) if "usage" in one][-1] == {"total_tokens": 9}
    assert seen[-1] == "data: [DONE]\n\n"
    reasons = [choice["finish_reason"] for one in parsed(seen) for choice in one["choices"]]
    assert [reason for reason in reasons if reason][-1:] == ["stop"]
    if cut:
        assert {one["id"] for one in parsed(seen)} == {"first"}


@pytest.mark.parametrize("cut", range(7))
def test_tokens_are_joined_also_where_they_add_no_text(cut: int):
    pieces = [("Caf", [1]), ("", [2]), ("\u00e9", [3]), (" ", [4, 5]), ("", [6]), ("now", [7])]

    def events(name: str) -> list[str]:
        return [
            event(id=name, choices=[{"index": 0, "delta": {"content": piece}, "token_ids": ids, "finish_reason": None}])
            for piece, ids in pieces
        ]

    seen = [*events("first")[:cut], *rest(events("first")[:cut], events("again"))]
    tokens = [token for one in parsed(seen) for choice in one["choices"] for token in choice["token_ids"]]
    assert (text(seen), tokens) == ("Caf\u00e9 now", [1, 2, 3, 4, 5, 6, 7])


def test_cut_twice_it_is_whole():
    whole = chat(WORDS)
    first = whole[:3]
    second = [*first, *rest(first, chat(WORDS)[:6])]
    assert text([*second, *rest(second, chat(WORDS))]) == "".join(WORDS)


def test_choices_are_joined_each():
    sent = chat(WORDS)[:4] + chat(WORDS[::-1], index=1)[:2]
    seen = sent + rest(sent, chat(WORDS)[:-2] + chat(WORDS[::-1], index=1)[:-2])
    assert (text(seen), text(seen, 1)) == ("".join(WORDS), "".join(WORDS[::-1]))


def test_completions_are_joined_too():
    events = [event(id="one", choices=[{"index": 0, "text": word, "finish_reason": None}]) for word in WORDS]
    assert text([*events[:3], *rest(events[:3], events)]) == "".join(WORDS)


@pytest.mark.parametrize("again", [["The ", "third "], ["The "]])
def test_another_answer_is_refused(again: list[str]):
    with pytest.raises(AnswerDiffers):
        rest(chat(WORDS)[:4], chat(again))


def test_what_is_no_text_is_refused():
    call = event(id="one", choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}])
    with pytest.raises(AnswerDiffers):
        Resumption([call])
    with pytest.raises(AnswerDiffers):
        Resumption(chat(WORDS)[:2]).rest(call)
