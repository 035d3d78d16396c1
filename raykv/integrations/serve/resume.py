"""Resumes a broken stream: removes from the repeated answer what the client already has. No I/O."""

import json
from collections.abc import Iterable
from typing import Any, Final

PREFIX: Final = "data: "
DONE: Final = "[DONE]"


class AnswerDiffers(Exception):
    """The repeated answer differs from the part that the client has, so the two cannot be joined."""


class Resumption:
    """Removes from a repeated answer the part that the client already has."""

    def __init__(self, sent: Iterable[str]) -> None:
        """Remember the text of `sent`: the events that the client has received."""
        self._left: dict[int, str] = {}
        self._tokens_left: dict[int, int] = {}
        self._identity: dict[str, Any] = {}
        for event in sent:
            fields = _fields(event)
            self._identity = self._identity or {name: fields[name] for name in ("id", "created") if name in fields}
            for choice in fields.get("choices", ()):
                index = choice["index"]
                self._left[index] = self._left.get(index, "") + _text(choice)
                self._tokens_left[index] = self._tokens_left.get(index, 0) + len(choice.get("token_ids") or ())

    def rest(self, event: str) -> str | None:
        """Return the new part of an event of the repeated answer. None means that the client has the whole event.

        Raises:
            AnswerDiffers: The repeated answer differs from the first one.
        """
        fields = _fields(event)
        if not fields:
            return event
        fields |= self._identity
        choices = fields.get("choices", [])
        fields["choices"] = [choice for choice in choices if self._cut(choice)]
        if choices and not fields["choices"]:
            return None
        return f"{PREFIX}{json.dumps(fields)}\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Remove from one choice the part that the client has. Return False if nothing is left.

        Raises:
            AnswerDiffers: The choice differs from the first answer.
        """
        index = choice["index"]
        left = self._left.get(index)
        if left is None:
            return True
        text, tokens = _text(choice), choice.get("token_ids") or []
        common = min(len(left), len(text))
        if left[:common] != text[:common] or (choice.get("finish_reason") and len(text) < len(left)):
            raise AnswerDiffers
        self._left[index] = left[common:]
        # Token ids are sent only on request. An event may have ids but no text, if a token is a part of a character.
        if tokens:
            choice["token_ids"] = tokens[self._tokens_left[index] :]
            self._tokens_left[index] = max(0, self._tokens_left[index] - len(tokens))
        if "delta" in choice:
            choice["delta"] = {"content": text[common:]}
        else:
            choice["text"] = text[common:]
        return bool(len(text) > common or choice.get("token_ids") or choice.get("finish_reason"))


def _fields(event: str) -> dict[str, Any]:
    body = event.strip().removeprefix(PREFIX)
    fields: dict[str, Any] = {} if body == DONE else json.loads(body)
    return fields


def _text(choice: dict[str, Any]) -> str:
    """Return the text that one event adds to a choice.

    Raises:
        AnswerDiffers: The event adds something that cannot be joined, such as a tool call.
    """
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = {name: value for name, value in choice["delta"].items() if value and name != "role"}
    text: str = delta.pop("content", "")
    if delta:
        raise AnswerDiffers
    return text
