"""Chat templates as fixed texts: the same text as the template gives, or none."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from raykv.integrations.serve.frames import Frames, Message

sandbox = pytest.importorskip("jinja2.sandbox")

CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
STRIPPING = """<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|end_header|>

{{ m.content | trim }}<|eot|>{% endfor %}<|header|>assistant<|end_header|>

"""
THINKING = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and '</think>' in m.content %}\
{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}<|assistant|>"""
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}" + CHATML
MERGING = """{% set ns = namespace(system='') %}{% for m in messages %}\
{% if m.role == 'system' %}{% set ns.system = m.content %}\
{% elif m.role == 'user' %}[INST] {% if loop.last %}{{ ns.system }}

{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
COUNTING = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"
REMEMBERING = """{% for m in messages %}{{ m.role }}: \
{% if loop.index < messages | length - 2 %}...{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
UPPER = "{% for m in messages %}{{ m.role }}: {{ m.content | capitalize }}\n{% endfor %}"
PIECES = ["word ", "Two words. ", "\n\n", "<b>", "{{ x }}", "1234", "   ", "Ünïcode ", "你好", "\t", "<|eot|>"]


def renderer(template: str) -> Callable[[Sequence[Message]], str]:
    compiled = sandbox.ImmutableSandboxedEnvironment().from_string(template)
    return lambda messages: compiled.render(messages=messages)


def conversation(rng: Random) -> list[dict[str, Any]]:
    first = ["system"] if rng.random() < 0.5 else []
    roles = [*first, "user", *["assistant", "user"] * rng.randrange(8)]
    return [{"role": each, "content": "".join(rng.choices(PIECES, k=rng.randrange(1, 40)))} for each in roles]


@pytest.mark.parametrize("template", [CHATML, STRIPPING, THINKING])
def test_the_texts_give_what_the_template_gives(template: str, rng: Random):
    render = renderer(template)
    frames = Frames.of(template, render)
    assert frames is not None
    assert frames.strips == (template == STRIPPING)
    for _ in range(200):
        messages = conversation(rng)
        assert frames.text(messages) == render(messages)


def test_empty_fields_of_a_repeated_answer_change_nothing():
    frames = Frames.of(CHATML, renderer(CHATML))
    assert frames is not None
    answer = {"role": "assistant", "content": "y"}
    more = {"refusal": None, "annotations": None, "name": None, "tool_calls": [], "reasoning": None}
    users = [{"role": "user", "content": each} for each in "xz"]
    assert frames.text([users[0], {**answer, **more}, users[1]]) == frames.text([users[0], answer, users[1]])


@pytest.mark.parametrize("template", [DATED, MERGING, COUNTING, REMEMBERING, UPPER, "", "nothing of it"])
def test_a_template_that_does_more_is_rendered(template: str):
    assert Frames.of(template, renderer(template)) is None


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": None, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": "x", "name": "Ada"}],
        [{"role": "user", "content": "x", "name": ""}],
        [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "x", "reasoning": "so"}],
        [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so</think>y"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ],
)
def test_messages_that_may_be_treated_otherwise_have_no_text(messages: list[Any]):
    frames = Frames.of(THINKING, renderer(THINKING))
    assert frames is not None
    assert frames.text(messages) is None
