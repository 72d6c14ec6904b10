"""Forces answers to obey a JSON schema or to be tool calls, by masks over the vocabulary from llguidance."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.grammar import DEFINITIONS, answer_grammar, form_rules, json_rule, literal
from parkd.answers.schema_multiples import can_divide, check_multiples
from parkd.answers.trials import Trials, is_costly
from parkd.errors import EngineFailure, InvalidRequest, SchemaTooComplex
from parkd.types import FormKind, StillWanted, TextForm, TokenMask, ToolChoiceMode, TurnRequest, always_wanted

SCHEMA_DEPTH_LIMIT = 32
"""How deep a faulty part of a schema is searched for."""
FAULT_SEARCH_S = 2.0
"""Seconds of CPU that the search may take. After that, the smallest part that is known to be at fault is named."""

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
        self,
        tokenizer: str | Callable[[], LLTokenizer],
        vocab_size: int,
        end_token_ids: frozenset[int],
        namespaces: int = 1,
    ) -> None:
        """`tokenizer` is the text of a `tokenizer.json`, or a function that makes the compiled tokenizer. `vocab_size`
        is the model's number of logits. `namespaces` of keys use it."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self.trials = Trials(namespaces=namespaces)
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

    def mask(
        self,
        request: TurnRequest,
        output: OutputFormat,
        prompt_tail: str,
        still_wanted: StillWanted = always_wanted,
    ) -> TokenMask | None:
        """The mask for a request; None if it needs none.

        `prompt_tail` is the end of the rendered prompt. Raises InvalidRequest for a schema that cannot be enforced,
        with the faulty part, and for a forced call if the model's format of calls is not known; and what
        `still_wanted` raises.
        """
        tools = _tools_to_allow(request, output)
        schema, form = request.response_schema, request.response_form
        free = not _is_forced(request.tool_choice.mode) and schema is None and form is None
        if free and not tools and not _forbids_all(request, output):
            return None
        if request.prompt is not None:
            output = replace(output, reasoning=None)
        params = [f"tools[{request.tools.index(tool)}]" for tool in tools]
        tools = [self._enforceable(tool, request, param) for tool, param in zip(tools, params, strict=True)]
        self._check_cost(schema, form, tools, request.namespace, still_wanted)
        if schema is not None:
            self._check_schema(schema)
        for tool, param in zip(tools, params, strict=True):
            still_wanted()
            self._try_large(tool, output, param)
        still_wanted()
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

    def _check_cost(
        self,
        schema: Mapping[str, Any] | None,
        form: TextForm | None,
        tools: Sequence[Mapping[str, Any]],
        namespace: str,
        still_wanted: StillWanted,
    ) -> None:
        """Compiles what may keep the library busy for long in another process. Raises SchemaTooComplex if that does not
        end in time, and InvalidRequest for a text that is too long, or a form that cannot be enforced."""
        rules: dict[str, str] = {}
        if schema is not None:
            check_multiples(schema, "response_format")
            if is_costly(schema):
                rules["json_answer"] = f"json_answer: {json_rule(schema)}"
        if form is not None and form.kind is not FormKind.CHOICE:
            rules["form_answer"] = "\n".join(form_rules(form))
        for index, tool in enumerate(tools):
            parameters = tool["function"].get("parameters")
            if is_costly(parameters):
                rules[f"arguments_{index}"] = f"arguments_{index}: {json_rule(parameters, lenient=True)}"
        if not rules:
            return
        param = form.param if form is not None else "tools" if schema is None else "response_format"
        grammar = "\n".join([f"start: {' | '.join(rules)}", *rules.values(), ""])
        if len(grammar) > GRAMMAR_CHARACTERS_LIMIT:
            raise InvalidRequest("The schema is too long to be enforced. Send a smaller one.", param=param)
        error = self.trials.check(grammar, param, namespace, still_wanted)
        # What is wrong with a schema is said when it is compiled here. A form could name a token that the trial does
        # not know, and so end before its costly part.
        if error and form is not None:
            raise InvalidRequest(
                f"`{param}` cannot be enforced: {error}. Change it, or describe the form in a message.", param=param
            )

    def _enforceable(self, tool: Mapping[str, Any], request: TurnRequest, param: str) -> Mapping[str, Any]:
        """The tool as its calls are enforced: without the keywords that cannot be, unless it is strict, which alone
        promises that they hold. Raises InvalidRequest for a tool whose calls cannot be enforced."""
        function = tool["function"]
        if function["name"] not in request.strict_tools:
            tool = {**tool, "function": {**function, "parameters": self._loosened(function.get("parameters"))}}
        check_multiples(tool["function"].get("parameters"), param)
        return tool

    def _try_large(self, tool: Mapping[str, Any], output: OutputFormat, param: str) -> None:
        """Tries a large tool alone, since in the grammar of the answer it may come after thinking, or after a choice
        among tools. Raises SchemaTooComplex."""
        if len(json.dumps(tool["function"].get("parameters"))) < LARGE_TOOL_CHARACTERS:
            return
        plain = replace(output, reasoning=None)
        matcher = self._matcher(answer_grammar(None, None, [tool], plain, "", self._terms, parallel=False))
        if not matcher.is_error():  # else so is the grammar of the answer
            self._tried(matcher, param)

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
        error = self._schema_error(schema, schema)
        if error is None:
            return
        path = "schema"
        part: Mapping[str, Any] = schema
        until_s = time.thread_time() + FAULT_SEARCH_S
        for _ in range(SCHEMA_DEPTH_LIMIT):
            faulty = self._first_faulty(list(_children(part)), schema, until_s)
            if faulty is None:
                break
            name, part, error = faulty
            path = f"{path}.{name}"
        raise InvalidRequest(
            f"The response format cannot be enforced: at `{path}`: {error} Change or remove that part.", param=path
        )

    def _first_faulty(
        self, children: Sequence[tuple[str, Mapping[str, Any]]], root: Mapping[str, Any], until_s: float
    ) -> tuple[str, Mapping[str, Any], str] | None:
        """The first of these parts of `root` with an error, by halving, and the error; None if there is none or the
        time is up. Several are tried together as the items of a list, where none is combined with another."""
        while children and time.thread_time() < until_s:
            if len(children) == 1:
                name, child = children[0]
                error = self._schema_error(child, root)
                return None if error is None else (name, child, error)
            half = children[: len(children) // 2]
            together = {"type": "array", "prefixItems": [child for _, child in half], "items": False}
            children = half if self._schema_error(together, root) is not None else children[len(half) :]
        return None

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
