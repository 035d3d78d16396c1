"""Makes the text of a request as its engine makes it, and the tokens of pieces of text.

An engine makes its own tokens; these only serve the router. So what is not supported here (images, tokenizers of other
kinds) costs no request, only a worse route.
"""

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

from vllm.renderers.hf import _detect_content_format
from vllm.tokenizers import get_tokenizer

from raykv.integrations.routing.report import TokenizerReport
from raykv.integrations.routing.segments import Cutter
from raykv.integrations.serve.frames import Frames

MAX_TEXT_CHARS: Final = 2_000_000
"""Longer prompts are not read."""
_SAMPLES: Final = ("The first part of a text", " and the rest of it.\n\n  Ünïcode, 1234 and  spaces: 你好")
_SPECIAL_SAMPLE: Final = "user\nHello there. Is this so?"


class Texts:
    """The tokenizer and the chat template of one model."""

    def __init__(self, settings: TokenizerReport) -> None:
        """Load the tokenizer. This takes seconds.

        Raises:
            Exception: The tokenizer cannot be loaded, or has no fast version. Which exception, depends on the library.
        """
        self.settings = settings
        self._tokenizer: Any = get_tokenizer(
            settings.tokenizer,
            tokenizer_mode=settings.mode,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
        self._encode: Callable[..., Any] = self._tokenizer.backend_tokenizer.encode
        added = [token for token in self._tokenizer.added_tokens_decoder.values() if not (token.lstrip or token.rstrip)]
        specials = [token.content for token in added]
        self.cutter = Cutter(specials, cuts=self._can_be_cut(specials))
        template = self.settings.chat_template or self._tokenizer.chat_template
        self._template: str | None = template if isinstance(template, str) else None
        self._as_parts = self._expects_parts()
        self._frames = None if self._as_parts else self._find_frames()
        self.prefix: tuple[int, ...] = tuple(self._encode("", add_special_tokens=True).ids)
        """The tokens that the tokenizer puts before a prompt that is no chat."""

    def _expects_parts(self) -> bool:
        """Whether the chat template expects a list of parts as the content of a message."""
        if self.settings.content_format != "auto":
            return self.settings.content_format == "openai"
        return self._template is not None and _detect_content_format(self._template, default="string") == "openai"

    def _find_frames(self) -> Frames | None:
        if self._template is None:
            return None
        try:
            return Frames.of(self._template, lambda messages: self._render(messages, self.settings.template_kwargs))
        except Exception:  # noqa: BLE001 - a template raises what it likes, if it wants other roles
            return None

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without tokens that the tokenizer adds."""
        return [self._encode(text, add_special_tokens=False).ids for text in texts]

    def _can_be_cut(self, specials: Sequence[str]) -> bool:
        """Whether the parts of a text, cut as `Cutter` does, have the same tokens as the whole."""
        special = next((each for each in specials if each.startswith("<")), "")
        pairs = [_SAMPLES, (_SAMPLES[0], special + _SPECIAL_SAMPLE)] if special else [_SAMPLES]
        return all([*chain(*self.tokens(pair))] == self.tokens(["".join(pair)])[0] for pair in pairs)

    def text(self, request: Any) -> str | Sequence[int] | None:
        """Return the text or the tokens of a request's prompt. None: it is not supported."""
        prompt = getattr(request, "prompt", None)
        if prompt is not None:
            return _single(prompt)
        messages = getattr(request, "messages", None)
        return self._chat(request, messages) if isinstance(messages, list) and messages else None

    def _chat(self, request: Any, messages: list[Any]) -> str | None:
        # A template of the request may run for long, and engines refuse it by default.
        if getattr(request, "chat_template", None):
            return None
        variables = getattr(request, "chat_template_kwargs", None) or {}
        tools = getattr(request, "tools", None)
        begins = bool(getattr(request, "add_generation_prompt", True))
        continues = bool(getattr(request, "continue_final_message", False))
        if self._frames is not None and begins and not (variables or tools or continues):
            text = self._frames.text(messages)
            if text is not None:
                return text if len(text) <= MAX_TEXT_CHARS else None
        conversation = [_message(each, as_parts=self._as_parts) for each in messages]
        if None in conversation or sum(len(each["content"]) for each in conversation if each) > MAX_TEXT_CHARS:
            return None
        text = self._render(
            conversation,
            self.settings.template_kwargs | variables,
            tools=None if not tools else [each if isinstance(each, dict) else each.model_dump() for each in tools],
            add_generation_prompt=begins,
            continue_final_message=continues,
        )
        return text if len(text) <= MAX_TEXT_CHARS else None

    def _render(self, conversation: Sequence[Any], variables: dict[str, Any], **arguments: Any) -> str:
        """Render the chat template. By default, it adds the beginning of an answer."""
        free = {name: value for name, value in variables.items() if name not in ("chat_template", "tokenize")}
        text: str = self._tokenizer.apply_chat_template(
            conversation,
            chat_template=self.settings.chat_template,
            tokenize=False,
            **{"add_generation_prompt": True, **arguments, **free},
        )
        return text


def _single(prompt: Any) -> str | Sequence[int] | None:
    """Return the only prompt of a completion request. None: there are several, or too long ones."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt if 0 < len(prompt) <= MAX_TEXT_CHARS else None
    is_tokens = (
        isinstance(prompt, list) and prompt and all(type(each) is int and 0 <= each < 1 << 32 for each in prompt)
    )
    return prompt if is_tokens and len(prompt) <= MAX_TEXT_CHARS else None


def _message(message: Any, *, as_parts: bool) -> dict[str, Any] | None:
    """Return a message as vLLM gives it to the chat template. None: it has content that is no text."""
    fields = dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = fields.get("content")
    parts = [content] if isinstance(content, str) else list(content or ())
    texts = [each if isinstance(each, str) else each.get("text") for each in parts]
    if not all(isinstance(each, str) for each in texts):
        return None
    as_list = as_parts and fields["role"] != "tool"
    made = {
        **{name: fields[name] for name in ("name", "tool_call_id", "reasoning") if fields.get(name) is not None},
        "role": fields["role"],
        "content": [{"type": "text", "text": text} for text in texts] if as_list else "\n".join(texts),
    }
    if "reasoning" in made:
        made["reasoning_content"] = made["reasoning"]
    if calls := fields.get("tool_calls"):
        made["tool_calls"] = [_call(each) for each in calls]
    return made


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates expect it."""
    fields = dict(call) if isinstance(call, dict) else call.model_dump(exclude_none=True)
    function = dict(fields["function"])
    arguments = function.get("arguments") or {}
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**fields, "function": function}
