"""Chat templates render as by transformers, with which their authors tried them, and see plain values only."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from parkd_engine.families.presets.words import CHATML
from transformers.utils.chat_template_utils import render_jinja_template

from parkd.engine_adapter.rendered import RenderedTemplate
from parkd.errors import Cancelled, InvalidRequest
from parkd.identity.watched import WatchedTemplate
from parkd.words.jinja_templates import plain, render
from parkd.words.templates import ChatTemplate
from tests.integration.llama import tiny_gguf
from tests.npm_tokenizers import npm_folder

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>.\n"},
    {"role": "user", "content": [{"type": "text", "text": "Grüße"}, {"type": "image"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, True]}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "'quoted' é"},
    {"role": "user", "content": "Go on."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"z": 1, "a": "ü"}}}}]
TEMPLATES = {
    "chatml": CHATML,
    "gguf": tiny_gguf.CHATML,
    "json": "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson(indent=2) }}"
    "{{ tools | tojson(sort_keys=True, separators=(',', ':')) }}{{ tools | tojson(ensure_ascii=True) }}",
    "blocks": "  {% if tools %}\n  tools\n  {% endif %}\n{%- for m in messages %}\n    {{ m.role }}\n  {% endfor %}\n",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, self=1, **{'k': 2}) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ ns.self }}{{ ns.k }}",
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict([('k', 'v')]) }}",
    "generation": "{% for m in messages %}{% set x = m.role %}{% generation %}{% set x = 'inside' %}[{{ x }}]"
    "{% endgeneration %}{{ x }}{% endfor %}{% if add_generation_prompt %}!{% endif %}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "named": "{{ bos_token }}{{ enable_thinking }}{{ documents }}{{ missing }}{{ n + 1 }}",
    "today": "{{ strftime_now('%Y-%m') }}",
    "content": "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{{ m['content'] }}{% endif %}{{ m.get('tool_calls', []) }}{{ m.tool_calls is defined }}{% endfor %}",
}


def by_library(source: str, messages: list[dict[str, Any]], tools: Any, named: dict[str, Any], more: bool) -> str:
    texts, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=more, **named
    )
    return str(texts[0])


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_renders_as_the_library_renders_it(name: str, more: bool) -> None:
    named = {"bos_token": "<s>", "enable_thinking": False, "n": 3}
    messages = MESSAGES if name not in ("chatml", "gguf") else [MESSAGES[0], MESSAGES[-1]]
    for tools in (TOOLS, None):
        expected = by_library(TEMPLATES[name], messages, tools, named, more)
        assert render(TEMPLATES[name], messages, tools, named, add_generation_prompt=more) == expected


def test_documents_may_be_given_by_name() -> None:
    source, documents = "{% for d in documents %}{{ d.title }}{% endfor %}", [{"title": "T", "text": "t"}]
    expected = by_library(source, MESSAGES, None, {"documents": documents}, False)
    assert render(source, MESSAGES, None, {"documents": documents}, add_generation_prompt=False) == expected == "T"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{{ namespace(_x=1) }}", "_x"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ dict.mro() }}", "mro"),
        ("{% for %}", "Expected"),
    ],
)
def test_what_leaves_the_sandbox_or_refuses_is_an_error(source: str, error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        render(source, MESSAGES, None, {}, add_generation_prompt=False)


class Kind(enum.StrEnum):
    USER = "user"


class Harmful:
    def remove(self) -> None:
        raise AssertionError("a template called a method of a value that a client's message had")


def test_templates_see_plain_values_alone() -> None:
    message = {"role": Kind.USER, "content": Harmful(), "n": np.float32(0.5), "yes": np.bool_(False)}
    assert plain(message) == {"role": "user", "content": "<Harmful>", "n": 0.5, "yes": False}
    assert type(plain(message)["role"]) is str
    with pytest.raises(TemplateError):
        render("{{ messages[0].content.remove() }}", [message], None, {}, add_generation_prompt=False)
    assert issubclass(SecurityError, TemplateError)


class Source:
    chat_template = "{% for a in messages %}{% for b in messages %}{{ a.role }}{{ b.role }}{% endfor %}{% endfor %}"
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - the library's interface

    def get_chat_template(self, source: str | None, _tools: Any) -> str:
        return source or self.chat_template


def test_reading_messages_tells_whoever_waits_for_the_prompt() -> None:
    """The library copies messages before the template reads them, so a rendering could not be given up."""
    asked = []

    def still_wanted() -> None:
        asked.append(len(asked))
        if len(asked) > 3:
            raise Cancelled("The client left.")

    template = WatchedTemplate(RenderedTemplate(ChatTemplate(Source(), None)), still_wanted)
    with pytest.raises(Cancelled):
        template.render([{"role": "user", "content": f"{number}"} for number in range(200)], (), {})
    assert len(asked) == 4


def test_a_template_that_fails_is_the_requests_fault() -> None:
    template = ChatTemplate(Source(), "{{ messages[0].content + 1 }}")
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        template.render([{"role": "user", "content": "a"}], (), {})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gemma3", "deepseek_v3"])
def test_published_templates_render_as_the_library_renders_them(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(npm_folder(family))
    source, named = tokenizer.chat_template, dict(tokenizer.special_tokens_map)
    assert len(source) > 200
    said = [{"role": "user", "content": "Hi é <b>"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\nYes."}]
    for messages in ([said[0]], [*said, said[0]], [{"role": "system", "content": "Be brief."}, *said, said[0]]):
        for tools in (None, TOOLS):
            for more in (False, True):
                expected = by_library(source, messages, tools, {**named, "date_string": "1 Dec"}, more)
                made = render(source, messages, tools, {**named, "date_string": "1 Dec"}, add_generation_prompt=more)
                assert made == expected
