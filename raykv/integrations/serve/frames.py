"""A chat template as fixed texts between the contents of messages.

A router reads each prompt before it sends the request on, and rendering the template takes about half of the time of a
decision. Most templates put the same text between a message of one role and the next one of another role, whatever the
messages say. `Frames.of` finds these texts, and compares what they give with what the template gives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Renders a template for messages whose content is a text."""

_CHANGING: Final = "strftime_now"
"""Templates that contain this put the date into the prompt."""
_MARKED: Final = "</"
"""Contents with this text may be marked up, like a thought, which some templates leave out in later turns."""
_MORE: Final = ("name", "tool_call_id", "reasoning", "tool_calls")
"""Other fields that templates get: see `texts.py`. Clients that repeat an answer send them empty."""
_TALK: Final = ("user", "assistant", "user", "assistant", "user")
_ORDERS: Final = (_TALK, ("system", *_TALK))
_CONTENTS: Final = (
    ("First marker", "second marker", "third marker", "fourth marker", "fifth marker", "sixth marker"),
    ("\n 1. Ünïcode: 你好 \n", "  a: b\n\n\nc", "<b> {{ x }} {% y %}", "\t", "x\n", "What is 2 + 2 ?"),
)


@dataclass(frozen=True, slots=True)
class Frames:
    """The texts before, between and after the contents of messages.

    Attributes:
        joints: Each text, by the roles of the messages before and after it. No role is "".
        strips: Whether the template removes white space around a content.
    """

    joints: Mapping[tuple[str, str], str]
    strips: bool = False

    @classmethod
    def of(cls, template: str, render: Render) -> "Frames | None":
        """Find the texts of a template. None: it does more with messages than to put texts between them."""
        if _CHANGING in template:
            return None
        joints: dict[tuple[str, str], str] = {}
        for roles in _ORDERS:
            rest, before = render(_messages(roles, _CONTENTS[0])), ""
            for role, content in zip(roles, _CONTENTS[0], strict=False):
                joint, found, rest = rest.partition(content)
                if not found or joints.setdefault((before, role), joint) != joint:
                    return None
                before = role
            if joints.setdefault((before, ""), rest) != rest:
                return None
        samples = [_messages(roles, contents) for roles in _ORDERS for contents in _CONTENTS]
        for frames in (cls(joints), cls(joints, strips=True)):
            if all(frames.text(each) == render(each) for each in samples):
                return frames
        return None

    def text(self, messages: Sequence[Any]) -> str | None:
        """Return what the template gives. None: it must be rendered, because it may do more with these messages."""
        pieces: list[str] = []
        before = ""
        for message in messages:
            if not isinstance(message, dict):
                return None
            if len(message) > 2 and any(message.get(each) not in (None, []) for each in _MORE):
                return None
            role, content = message.get("role"), message.get("content")
            if not (role and isinstance(role, str) and isinstance(content, str)) or _MARKED in content:
                return None
            joint = self.joints.get((before, role))
            if joint is None:
                return None
            pieces += joint, content.strip() if self.strips else content
            before = role
        end = self.joints.get((before, ""))
        return None if end is None else "".join([*pieces, end])


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
