"""Forces answers to obey a JSON schema or to be tool calls, by masks over the vocabulary from llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.grammar import DEFINITIONS, answer_grammar, json_rule, literal
from parkd.answers.schema_multiples import can_divide, check_multiples
from parkd.errors import EngineFailure, InvalidRequest, SchemaTooComplex
from parkd.types import TokenMask, ToolChoiceMode, TurnRequest

SCHEMA_DEPTH_LIMIT = 32
"""How deep a faulty part of a schema is searched for."""

GRAMMAR_CHARACTERS_LIMIT = 512 * 1024
"""Longer schemas, and longer tools of a forced call, are refused before they are compiled."""

LARGE_TOOL_CHARACTERS = 4096
"""Tools of at least so many characters are tried alone, which takes milliseconds for each."""

SELF_REFERENCE = "NoExtension"
"""Begins the library's error about a grammar that no text obeys."""
ENDLESS = "it refers to itself without end, so that no answer could obey it"


class GrammarMask:
    """A `TokenMask` over a compiled grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str) -> None:
        """`param` is the field of the request that the grammar is made of."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._param = param

    def allowed(self) -> npt.NDArray[np.bool_]:
        """`[vocab]`; only end tokens once the answer is complete. Raises SchemaTooComplex beyond the limits of the
        library."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def accept(self, token_id: int) -> None:
        """Raises EngineFailure for a token that was not allowed, and SchemaTooComplex."""
        if not self._matcher.is_stopped():
            is_allowed = self._matcher.validate_tokens([token_id]) == 1
            self._check()
            if not is_allowed:
                raise EngineFailure(f"Token {token_id} is not allowed by the answer's schema. Send the request again.")
            self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SchemaTooComplex(_first_line(self._matcher), param=self._param)


class StructuredOutput:
    """Compiles masks for one tokenizer. Thread-safe. Reading a large vocabulary takes seconds; call `prepare` ahead, or
    the first mask does it."""

    def __init__(
        self, tokenizer: str | Callable[[], LLTokenizer], vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        """`tokenizer` is the text of a `tokenizer.json`, or a function that makes the compiled tokenizer. `vocab_size`
        is the model's number of logits."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._building = threading.Lock()
        self._built: LLTokenizer | None = None

    def prepare(self) -> None:
        with self._building:
            if self._built is None:
                self._built = self._build()

    def _build(self) -> LLTokenizer:
        if isinstance(self._source, str):
            return LLTokenizer(self._source, n_vocab=self._vocab_size, eos_token=self._end_token_ids)
        return self._source()

    @property
    def _tokenizer(self) -> LLTokenizer:
        self.prepare()
        assert self._built is not None
        return self._built

    def mask(self, request: TurnRequest, output: OutputFormat, prompt_tail: str) -> TokenMask | None:
        """The mask for a request; None if it needs none.

        `prompt_tail` is the end of the rendered prompt. Raises InvalidRequest for a schema that cannot be enforced,
        with the faulty part, and for a forced call if the model's format of calls is not known.
        """
        tools = _tools_to_allow(request, output)
        schema, form = request.response_schema, request.response_form
        free = not _is_forced(request.tool_choice.mode) and schema is None and form is None
        if free and not tools and not _forbids_all(request, output):
            return None
        if request.prompt is not None:
            output = replace(output, reasoning=None)
        if schema is not None:
            self._check_schema(schema)
        tools = [self._checked_tool(tool, request, output) for tool in tools]
        param = form.param if form is not None else "tools" if schema is None else "response_format"
        grammar = answer_grammar(
            schema, form, tools, output, prompt_tail, self._terms, parallel=request.parallel_tool_calls, free=free
        )
        matcher = self._matcher(grammar, param)
        if matcher.is_error() and form is not None:
            raise InvalidRequest(
                f"`{param}` cannot be enforced: {_first_line(matcher)}. Change it, or describe the form in a message.",
                param=param,
            )
        if matcher.is_error():
            raise InvalidRequest(
                f"The tools cannot be turned into a grammar: {matcher.get_error()} Simplify them, or use `tool_choice: "
                f"auto`.",
                param="tools",
            )
        return self._tried(matcher, "tools" if tools else param)

    def _tried(self, matcher: LLMatcher, param: str) -> GrammarMask:
        """The mask of a compiled grammar, after the beginning of a trial answer under a copy of it: some limits of the
        library are met only when an object's properties or a pattern's text begin. Raises SchemaTooComplex."""
        trial = matcher.deep_copy()
        trial.consume_tokens(trial.compute_ff_tokens())
        forced = self._tokenizer.tokenize_bytes(trial.compute_ff_bytes())
        trial.consume_tokens(forced[: trial.validate_tokens(forced)])
        trial.compute_bitmask()
        if trial.is_error():
            raise SchemaTooComplex(_first_line(trial), param=param)
        return GrammarMask(matcher, self._vocab_size, param)

    def _matcher(self, grammar: str, param: str = "response_format") -> LLMatcher:
        if len(grammar) > GRAMMAR_CHARACTERS_LIMIT:
            raise InvalidRequest("The schema is too long to be enforced. Send a smaller one.", param=param)
        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LLParserLimits())

    def _terms(self, text: str) -> str:
        """`text` as grammar terms; special tokens, which no literal matches, by id."""
        terms: list[str] = []
        rest = text
        for token_id in self._tokenizer.tokenize_str(text, parse_special=True):
            if self._tokenizer.is_special_token(token_id):
                plain, found, after = rest.partition(self._tokenizer.decode_str([token_id]))
                if found:
                    terms += [*([literal(plain)] if plain else []), f"<[{token_id}]>"]
                    rest = after
        return " ".join([*terms, *([literal(rest)] if rest else [])])

    def _checked_tool(self, tool: Mapping[str, Any], request: TurnRequest, output: OutputFormat) -> Mapping[str, Any]:
        """The tool as its calls are enforced: without the keywords that cannot be, unless it is strict, which alone
        promises that they hold. Raises InvalidRequest for a tool whose calls cannot be enforced. Large ones are tried
        alone, since in the grammar of the answer they may come after thinking, or after a choice among tools."""
        param = f"tools[{request.tools.index(tool)}]"
        function = tool["function"]
        if function["name"] not in request.strict_tools:
            tool = {**tool, "function": {**function, "parameters": self._loosened(function.get("parameters"))}}
        parameters = tool["function"].get("parameters")
        check_multiples(parameters, param)
        if len(json.dumps(parameters)) < LARGE_TOOL_CHARACTERS:
            return tool
        plain = replace(output, reasoning=None)
        matcher = self._matcher(answer_grammar(None, None, [tool], plain, "", self._terms, parallel=False))
        if not matcher.is_error():  # else so is the grammar of the answer
            self._tried(matcher, param)
        return tool

    def _loosened(self, schema: Any) -> Any:
        """The schema without patterns and divisors that the library cannot enforce."""
        if isinstance(schema, list):
            return [self._loosened(part) for part in schema]
        if not isinstance(schema, Mapping):
            return schema
        kept = {keyword: self._loosened(value) for keyword, value in schema.items()}
        if isinstance(kept.get("pattern"), str) and not self._knows_pattern(kept["pattern"]):
            del kept["pattern"]
        if isinstance(kept.get("patternProperties"), Mapping):
            known = {key: value for key, value in kept["patternProperties"].items() if self._knows_pattern(key)}
            kept["patternProperties"] = known
        if not can_divide(schema.get("multipleOf")):
            del kept["multipleOf"]
        return kept

    def _knows_pattern(self, pattern: str) -> bool:
        return not self._matcher(f"start: {json_rule({'type': 'string', 'pattern': pattern})}\n").is_error()

    def _check_schema(self, schema: Mapping[str, Any]) -> None:
        """Raises InvalidRequest that names the smallest part at fault, and SchemaTooComplex."""
        check_multiples(schema, "response_format")
        error = self._schema_error(schema, schema)
        if error is None:
            return
        path = "schema"
        part: Mapping[str, Any] = schema
        for _ in range(SCHEMA_DEPTH_LIMIT):
            for name, child in _children(part):
                if (inner := self._schema_error(child, schema)) is not None:
                    path, part, error = f"{path}.{name}", child, inner
                    break
            else:
                break
        raise InvalidRequest(
            f"The response format cannot be enforced: at `{path}`: {error} Change or remove that part.", param=path
        )

    def _schema_error(self, part: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        """What is wrong with a part of `root`, alone but with the definitions it may refer to."""
        definitions = {name: root[name] for name in DEFINITIONS if name in root and part is not root}
        matcher = self._matcher(f"start: {json_rule({**part, **definitions})}\n")
        if matcher.is_error():
            return " ".join(matcher.get_error().split()) + "."
        if part is root:
            matcher.compute_bitmask()  # only here does it notice a schema that refers to itself and to nothing else
            if matcher.is_error() and _first_line(matcher) == ENDLESS:
                return f"{ENDLESS}."
            self._tried(matcher, "response_format")
        return None


def _first_line(matcher: LLMatcher) -> str:
    """The error. After its first line the library prints the state of its parser. Its advice is for whoever writes
    grammars by hand."""
    line = str(matcher.get_error().partition("\n")[0].partition("; consider ")[0])
    return ENDLESS if line.startswith(SELF_REFERENCE) else line


def _tools_to_allow(request: TurnRequest, output: OutputFormat) -> Sequence[Mapping[str, Any]]:
    """The tools that a constrained answer may call; none where calls need no constraint."""
    choice, tools = request.tool_choice, request.tools
    forced = _is_forced(choice.mode)
    if forced and (not tools or output.tools is ToolFormat.NONE):
        why = "this model's chat template has no tools" if tools else "there are no `tools`"
        raise InvalidRequest(f"`tool_choice` forces a call, but {why}. Use `auto`.", param="tool_choice")
    if choice.mode is ToolChoiceMode.NAMED:
        return [tool for tool in tools if tool["function"]["name"] == choice.name]
    has_form = request.response_schema is not None or request.response_form is not None
    restricted = choice.allowed is not None and len(choice.allowed) < len(tools)
    if forced or (choice.mode is ToolChoiceMode.AUTO and (has_form or restricted)):
        allowed = [tool for tool in tools if choice.allowed is None or tool["function"]["name"] in choice.allowed]
        return allowed if output.tools is not ToolFormat.NONE else ()
    return ()


def _is_forced(mode: ToolChoiceMode) -> bool:
    return mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


def _forbids_all(request: TurnRequest, output: OutputFormat) -> bool:
    """Whether no tool may be called although the model is free to answer with text."""
    choice = request.tool_choice
    return bool(
        choice.mode is ToolChoiceMode.AUTO
        and choice.allowed is not None
        and not choice.allowed
        and request.tools
        and output.tools is not ToolFormat.NONE
    )


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas inside a schema, with their paths."""
    for keyword in ("properties", "$defs", "definitions", "patternProperties"):
        inner = schema.get(keyword)
        if isinstance(inner, Mapping):
            yield from ((f"{keyword}.{name}", child) for name, child in inner.items() if isinstance(child, Mapping))
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        several = schema.get(keyword)
        if isinstance(several, list):
            yield from ((f"{keyword}[{i}]", child) for i, child in enumerate(several) if isinstance(child, Mapping))
    for keyword in ("items", "additionalProperties"):
        child = schema.get(keyword)
        if isinstance(child, Mapping):
            yield keyword, child
