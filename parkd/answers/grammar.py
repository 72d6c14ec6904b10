"""Grammars for whole answers in llguidance's dialect of Lark: thinking, then JSON or tool calls in the model's format.
Only text is made here; `structured` compiles it.

    start: thinking? (json | calls)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from parkd.answers.base import OutputFormat, ReasoningMarks, ToolFormat
from parkd.answers.formats import opens_reasoning
from parkd.answers.harmony import (
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    ROLE,
    START,
)
from parkd.answers.readers.deepseek_calls import (
    ARGUMENTS,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FENCE,
    KIMI_BEGIN,
    KIMI_END,
    ONE_BEGIN,
    ONE_END,
    SEPARATOR,
)
from parkd.answers.readers.deepseek_calls import FUNCTIONS as KIMI_FUNCTIONS
from parkd.answers.readers.json_calls import TOOLCALL, TOOLCALL_END
from parkd.answers.readers.python_calls import CALLS_END as PYTHON_END
from parkd.answers.readers.python_calls import CALLS_START
from parkd.answers.readers.tag_calls import (
    INVOKE,
    INVOKE_END,
    KEY,
    KEY_END,
    MINIMAX_CALL,
    MINIMAX_END,
    NAME_END,
    PARAMETER,
    PARAMETER_END,
    VALUE,
    VALUE_END,
)
from parkd.answers.readers.xml_calls import SEED_CALL, SEED_END, TAGGED_CALL, TAGGED_END, takes_text
from parkd.errors import InvalidRequest
from parkd.types import FormKind, TextForm

Terms = Callable[[str], str]
"""Converts a text to grammar terms: special tokens by id, the rest as literals."""

ANY_TEXT = r"/(.|\n)*/"
NEWLINE = "\n"
REGEX_SIGNS = {"/": r"\/", "\n": r"\n"}
OPENERS: Mapping[ToolFormat, Sequence[str]] = {
    ToolFormat.HERMES: ("<tool_call>",),
    ToolFormat.QWEN_XML: ("<tool_call>", "<function="),
    ToolFormat.GLM: ("<tool_call>",),
    ToolFormat.MINIMAX: (MINIMAX_CALL,),
    ToolFormat.LLAMA: ("<|python_tag|>", "{"),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.GEMMA: ("<|tool_call>", "<start_function_call>"),
    ToolFormat.HARMONY: (CHANNEL,),
    ToolFormat.NEMOTRON: (TOOLCALL,),
    ToolFormat.KIMI: (KIMI_BEGIN,),
    ToolFormat.SEED: (SEED_CALL,),
    ToolFormat.PYTHON: (CALLS_START,),
    ToolFormat.DEEPSEEK: (CALLS_BEGIN,),
    ToolFormat.DEEPSEEK_FENCED: (CALLS_BEGIN,),
}
"""What begins calls in a text, for the parser. The first is what the grammar begins them with."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords with parts that a schema refers to."""
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Only one spacing is allowed: with free white space, a model may write spaces until it reaches its limit."""


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def form_rules(form: TextForm) -> list[str]:
    """Rules that define `form_answer`. Raises InvalidRequest for a grammar in neither language."""
    match form.kind:
        case FormKind.CHOICE:
            return [f"form_answer: {' | '.join(map(literal, form.source))}"]
        case FormKind.REGEX:
            # A slash ends an expression, and a rule is one line.
            pieces = (piece if len(piece) > 1 else REGEX_SIGNS.get(piece, piece) for piece in _pieces(str(form.source)))
            return [f"form_answer: FORM\nFORM: /{''.join(pieces)}/"]
    try:
        grammar = any_to_lark(str(form.source)).replace("%llguidance {}", "")
    except Exception as error:  # the converter raises that, and less
        raise InvalidRequest(f"The grammar cannot be read: {error}.", param=form.param) from None
    return [f"form_answer: %lark {{\n{grammar}\n}}"]


def _pieces(pattern: str) -> list[str]:
    """The characters of a regular expression, with a backslash and what it escapes together."""
    return re.findall(r"\\.|.", pattern, re.DOTALL)


def answer_grammar(
    schema: Mapping[str, Any] | None,
    form: TextForm | None,
    tools: Sequence[Mapping[str, Any]],
    output: OutputFormat,
    prompt_tail: str,
    terms: Terms,
    *,
    parallel: bool,
    free: bool = False,
) -> str:
    """The grammar of an answer that is JSON under `schema` (None: not allowed), a text of `form` (the same) or calls of
    `tools` (empty: no calls); with `free`, also any text that begins no other call. One of the four must be given."""
    rules: list[str] = []
    bodies = []
    text = _header(FINAL, terms) if output.tools is ToolFormat.HARMONY else ""
    if schema is not None:
        rules.append(f"json_answer: {json_rule(schema)}")
        bodies.append(f"{text}json_answer")
    if form is not None:
        rules += form_rules(form)
        bodies.append(f"{text}form_answer")
    if tools:
        rules += _CallGrammar(output.tools, terms).rules(tools, parallel=parallel)
        bodies.append("calls")
    if free:
        rules.append(f"FREE: {ANY_TEXT} & ~/{_with_any(OPENERS[output.tools])}/")
        # Only where a special token begins calls can a text end there: else the text would go on over the mark.
        calls_follow = tools and not text and terms(OPENERS[output.tools][0]).startswith("<[")
        bodies.append("FREE calls?" if calls_follow else f"{text}FREE")
        if text and tools:
            bodies.append(f"{_header(COMMENTARY, terms)}FREE {terms(END)} {_next_message(terms)} calls")
    behind = _next_message(terms) if text else r"/[ \n]{0,2}/"
    head = _thinking(output.reasoning, prompt_tail, terms, rules, behind)
    return "\n".join([f"start: {head}({' | '.join(bodies)})", *rules]) + "\n"


def _with_any(openers: Sequence[str]) -> str:
    """A regular expression for texts that contain one of the marks; of Llama's bare calls, that begin with a brace."""
    inside = "|".join(re.escape(mark).replace("/", r"\/") for mark in openers if mark != "{")
    bare = r"|[ \t\n\r]*\{(.|\n)*" if "{" in openers else ""
    return rf"(.|\n)*({inside})(.|\n)*{bare}"


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A `%json` term. With `lenient`, keywords that cannot be enforced are ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, "lenient": lenient}})


def _header(channel: str, terms: Terms) -> str:
    """What begins a message of harmony, followed by a space."""
    return f"{terms(CHANNEL)} {literal(channel)} {terms(MESSAGE)} "


def _next_message(terms: Terms) -> str:
    return f"{terms(START)} {literal(ROLE)}"


def _thinking(marks: ReasoningMarks | None, prompt_tail: str, terms: Terms, rules: list[str], behind: str) -> str:
    """The terms before the body, followed by a space; "" if the model does not think. `behind` comes between."""
    if marks is None or prompt_tail.rstrip().endswith(marks.close):
        return ""
    rules += [f"thought: {until(marks.close, terms, rules, 'ANY_THOUGHT')}", f"behind: {behind}"]
    if opens_reasoning(prompt_tail, marks):
        return "thought behind "
    return f"({terms(marks.open)} thought behind)? "


def until(close: str, terms: Terms, rules: list[str], name: str) -> str:
    """A term for any text up to and including `close`. A special token ends it by itself; a text must be searched
    for."""
    ending = terms(close)
    if ending.startswith("<["):
        rules.append(f"{name}: {ANY_TEXT}")
        return f"{name} {ending}"
    rules.append(f"{name.lower()}[suffix={literal(close)}]: {ANY_TEXT}")
    return name.lower()


class _CallGrammar:
    """Grammar rules for calls in one format."""

    def __init__(self, tools: ToolFormat, terms: Terms) -> None:
        self._format = tools
        self._terms = terms
        self._rules: list[str] = []

    def rules(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> list[str]:
        """Rules that define `calls`."""
        names = []
        for index, tool in enumerate(tools):
            function = tool["function"]
            parameters = function.get("parameters") or {"type": "object"}
            self._rules.append(f"call_{index}: {self._call(str(function['name']), parameters, index)}")
            names.append(f"call_{index}")
        before, between, after = self._frame()
        several = f" ({between} call)*" if parallel and self._format is not ToolFormat.HARMONY else ""
        self._rules += [f"calls: {before} call{several} {after}", f"call: {' | '.join(names)}"]
        return self._rules

    def _frame(self) -> tuple[str, str, str]:
        """The terms before, between and after the calls."""
        match self._format:
            case ToolFormat.MISTRAL if not self._mistral_named:
                return self._terms("[TOOL_CALLS]") + ' "["', '", "', '"]"'
            case ToolFormat.DEEPSEEK | ToolFormat.DEEPSEEK_FENCED:
                between = r'"\n"' if self._format is ToolFormat.DEEPSEEK_FENCED else '""'
                return self._terms(CALLS_BEGIN), between, self._terms(CALLS_END)
            case ToolFormat.LLAMA:
                return "", '"; "', ""
            case ToolFormat.HERMES | ToolFormat.QWEN_XML | ToolFormat.GLM | ToolFormat.SEED:
                return "", r'"\n"', ""
            case ToolFormat.NEMOTRON:
                return f'{self._terms(TOOLCALL)} "["', '", "', f'"]" {self._terms(TOOLCALL_END)}'
            case ToolFormat.KIMI:
                return self._terms(KIMI_BEGIN), '""', self._terms(KIMI_END)
            case ToolFormat.PYTHON:
                return f'{self._terms(CALLS_START)} "["', '", "', f'"]" {self._terms(PYTHON_END)}'
            case ToolFormat.MINIMAX:
                return f"{self._terms(MINIMAX_CALL)} {literal(NEWLINE)}", '""', self._terms(MINIMAX_END)
            case _:
                return "", '""', ""

    @property
    def _mistral_named(self) -> bool:
        return self._terms("[ARGS]").startswith("<[")

    def _call(self, name: str, parameters: Mapping[str, Any], index: int) -> str:
        match self._format:
            case ToolFormat.QWEN_XML | ToolFormat.GLM | ToolFormat.MINIMAX | ToolFormat.SEED:
                return self._tagged_call(name, parameters, index)
            case ToolFormat.GEMMA:
                return self._gemma_call(name, parameters)
            case ToolFormat.PYTHON:
                return self._python_call(name, parameters, index)
            case ToolFormat.KIMI:
                number = f"number_{index}"
                self._rules.append(f"{number}: /[0-9]{{1,3}}/")
                told = literal(f"{KIMI_FUNCTIONS}{name}:")
                head, tail = f"{self._terms(ONE_BEGIN)} {told} {number} {self._terms(ARGUMENTS)}", self._terms(ONE_END)
            case ToolFormat.MISTRAL if self._mistral_named:
                head, tail = f"{self._terms('[TOOL_CALLS]')} {literal(name)} {self._terms('[ARGS]')}", ""
            case ToolFormat.HERMES:
                head = f"{self._terms('<tool_call>')} {literal(self._json_head(name, 'arguments'))}"
                tail = r'"}\n" ' + self._terms("</tool_call>")
            case ToolFormat.HARMONY:
                told = literal(f"{COMMENTARY}{RECIPIENT}{FUNCTIONS}{name} ")
                head = f'{self._terms(CHANNEL)} {told} {self._terms(CONSTRAIN)} "json" {self._terms(MESSAGE)}'
                tail = ""
            case ToolFormat.DEEPSEEK:
                head = f"{self._terms(CALL_BEGIN)} {literal(name)} {self._terms(SEPARATOR)}"
                tail = self._terms(CALL_END)
            case ToolFormat.DEEPSEEK_FENCED:
                begin, fence = self._terms(CALL_BEGIN), literal(f"{name}\n{FENCE}\n")
                head = f'{begin} "function" {self._terms(SEPARATOR)} {fence}'
                tail = rf'"\n```" {self._terms(CALL_END)}'
            case ToolFormat.LLAMA:
                head, tail = literal(self._json_head(name, "parameters").lstrip()), '"}"'
            case _:
                head, tail = literal(self._json_head(name, "arguments").lstrip()), '"}"'
        self._rules.append(f"arguments_{index}: {json_rule(parameters, lenient=True)}")
        return f"{head} arguments_{index} {tail}"

    def _json_head(self, name: str, key: str) -> str:
        return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '

    def _tagged_call(self, name: str, parameters: Mapping[str, Any], index: int) -> str:
        begin, end = self._around(name)
        pieces = [begin]
        required = parameters.get("required") or ()
        for place, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
            if isinstance(schema, Mapping):
                schema = {**{name: parameters[name] for name in DEFINITIONS if name in parameters}, **schema}
            pair = f"{self._before_value(key)} {self._tagged_value(schema, f'value_{index}_{place}')}"
            pieces.append(pair if key in required else f"({pair})?")
        return " ".join([*pieces, end])

    def _around(self, name: str) -> tuple[str, str]:
        """The terms at the beginning and at the end of a call in tags."""
        match self._format:
            case ToolFormat.GLM:
                return f"{self._terms('<tool_call>')} {literal(name + NEWLINE)}", self._terms("</tool_call>")
            case ToolFormat.MINIMAX:
                return literal(f"{INVOKE}{name}{NAME_END}{NEWLINE}"), literal(INVOKE_END + NEWLINE)
            case tools:
                opened, closed = (SEED_CALL, SEED_END) if tools is ToolFormat.SEED else (TAGGED_CALL, TAGGED_END)
                begin = f"{self._terms(opened)} {literal(f'{NEWLINE}<function={name}>{NEWLINE}')}"
                return begin, f"{literal(f'</function>{NEWLINE}')} {self._terms(closed)}"

    def _before_value(self, key: str) -> str:
        match self._format:
            case ToolFormat.GLM:
                terms = (self._terms(KEY), literal(key), self._terms(KEY_END), literal(NEWLINE), self._terms(VALUE))
                return " ".join(terms)
            case ToolFormat.MINIMAX:
                return literal(f"{PARAMETER}{key}{NAME_END}")
            case ToolFormat.SEED:
                return literal(f"<parameter={key}>")
            case _:
                return literal(f"<parameter={key}>{NEWLINE}")

    def _tagged_value(self, schema: Any, rule: str) -> str:
        """A term for a value and its closing tag: bare text, one of several texts, or JSON."""
        closing = {ToolFormat.GLM: VALUE_END, ToolFormat.MINIMAX: PARAMETER_END, ToolFormat.SEED: PARAMETER_END}
        tag = closing.get(self._format, f"{NEWLINE}</parameter>")
        is_token = self._terms(tag).startswith("<[")
        close = f"{self._terms(tag)} {literal(NEWLINE)}" if is_token else literal(tag + NEWLINE)
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(literal, choices))}) {close}"
        if takes_text(schema):
            # A token of the vocabulary's own ends a text by itself.
            self._rules.append(f"{rule}: {ANY_TEXT}" if is_token else f"{rule}[suffix={close}]: {ANY_TEXT}")
            return f"{rule} {close}" if is_token else rule
        self._rules.append(f"{rule}: {json_rule(schema, lenient=True)}")
        return f"{rule} {close}"

    def _python_call(self, name: str, parameters: Mapping[str, Any], index: int) -> str:
        """A term for one call. A text is written in JSON's quotes and escapes, which its reader takes."""
        required = [key for key in parameters.get("required") or () if isinstance(key, str)]
        pairs = []
        for place, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
            if isinstance(schema, Mapping):
                schema = {**{word: parameters[word] for word in DEFINITIONS if word in parameters}, **schema}
            rule = f"python_{index}_{place}"
            self._rules.append(f"{rule}: {json_rule(schema if isinstance(schema, Mapping) else {}, lenient=True)}")
            pairs.append((key in required, f"{literal(key + '=')} {rule}"))
        first = [pair for is_required, pair in pairs if is_required]
        others = [pair for is_required, pair in pairs if not is_required]
        told = ' ", " '.join(first)
        for place, pair in enumerate(others):
            if first or place == 0:
                told += f' (", " {pair})?' if first else f" ({pair})?"
        return f'{literal(f"{name}(")} {told} ")"'

    def _gemma_call(self, name: str, parameters: Mapping[str, Any]) -> str:
        """A term for one call. Parameter names are those of the schema; values need only be well-formed."""
        if not any(rule.startswith("g_value:") for rule in self._rules):
            quote = '<|"|>'
            self._rules += [
                f"g_string: {self._terms(quote)} {until(quote, self._terms, self._rules, 'G_TEXT')}",
                r"G_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
                "G_KEY: /[A-Za-z_][A-Za-z0-9_-]*/",
                'g_value: g_string | G_NUMBER | "true" | "false" | "null" | g_list | g_object',
                'g_list: "[" (g_value ("," g_value)*)? "]"',
                'g_object: "{" (G_KEY ":" g_value ("," G_KEY ":" g_value)*)? "}"',
            ]
        required = [key for key in parameters.get("required") or () if isinstance(key, str)]
        others = [key for key in parameters.get("properties") or {} if key not in required]
        pairs = ' "," '.join(f"{literal(key + ':')} g_value" for key in required)
        for place, key in enumerate(others):
            comma = '"," ' if required else ""
            if required or place == 0:
                pairs += f" ({comma}{literal(key + ':')} g_value)?"
        head, tail = self._terms("<|tool_call>"), self._terms("<tool_call|>")
        return f'{head} {literal(f"call:{name}{{")} {pairs} "}}" {tail}'
