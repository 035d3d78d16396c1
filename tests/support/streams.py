"""Streamed answers of an OpenAI server, for tests."""

import json
from typing import Any

WORDS = ["The ", "second ", "pump ", "starts ", "at ", "180 ", "cm."]


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def chat(words: list[str], name: str = "first", *, index: int = 0) -> list[str]:
    """A stream of chat events with one word each."""
    choices: list[dict[str, Any]] = [{"index": index, "delta": {"role": "assistant", "content": ""}}]
    choices += [{"index": index, "delta": {"content": word}} for word in words]
    choices[-1]["finish_reason"] = "stop"
    events = [event(id=name, created=len(name), choices=[{"finish_reason": None, **choice}]) for choice in choices]
    return [*events, event(id=name, created=len(name), choices=[], usage={"total_tokens": 9}), "data: [DONE]\n\n"]


def parsed(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(one.removeprefix("data: ")) for one in events if "[DONE]" not in one]


def text(events: list[str], index: int = 0) -> str:
    choices = [choice for one in parsed(events) for choice in one["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
