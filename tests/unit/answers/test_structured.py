"""Masks from schemas and tool choices: whatever is sampled under one parses as what was asked for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.harmony import ANALYSIS_MARKS, CHANNEL, CONSTRAIN, MESSAGE, START
from parkd.answers.parser import make_parser
from parkd.answers.readers.deepseek_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from parkd.answers.structured import StructuredOutput
from parkd.errors import EngineFailure, InvalidRequest, SchemaTooComplex
from parkd.types import (
    FinishReason,
    FormKind,
    ReasoningDelta,
    TextDelta,
    TextForm,
    TokenMask,
    ToolCallDelta,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)

VOCAB_SIZE = 420
END = 0
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]",
    "[ARGS]", CHANNEL, CONSTRAIN, MESSAGE, START, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
                "required": ["on"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "push")
]


def tokenizer(*, special: bool) -> Tokenizer:
    """Bytes and a few pairs; the markers as special tokens or not."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=sorted(alphabet), special_tokens=["<|end|>"])
    made.train_from_iterator(['{"name": "look", "arguments": {"on": true}}'] * 3, trainer)
    if special:
        made.add_special_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["special markers", "plain markers"])
def made(request: pytest.FixtureRequest) -> tuple[Tokenizer, StructuredOutput]:
    words = tokenizer(special=request.param)
    return words, StructuredOutput(words.to_str(), VOCAB_SIZE, frozenset({END}))


QUOTE = '<|"|>'


def sampled(words: Tokenizer, mask: TokenMask, seed: int) -> str:
    """Text of tokens drawn evenly from what is allowed. Draws could go on for ever: after some, what closes is taken
    first, and the end as soon as it is allowed."""
    chance = random.Random(seed)
    ids: list[int] = []
    while True:
        allowed = mask.allowed().nonzero()[0]
        assert len(allowed), "the mask leaves nothing to sample"
        token_id = int(chance.choice(allowed))
        if len(ids) > 40:
            text = words.decode(ids[-8:], skip_special_tokens=False)
            begun = next(n for n in range(len(QUOTE) - 1, -1, -1) if text.endswith(QUOTE[:n]))
            closing = [words.token_to_id(piece) for piece in ("<|end|>", *MARKERS, QUOTE[begun], "]", "}")]
            token_id = next((piece for piece in closing if piece in allowed), token_id)
        mask.accept(token_id)
        if token_id == END:
            return str(words.decode(ids, skip_special_tokens=False))
        ids.append(token_id)
        assert len(ids) < 1000


def asked(**changes: Any) -> TurnRequest:
    return TurnRequest(**changes)


def test_any_sample_obeys_the_schema(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    for seed in range(5):
        mask = structured.mask(asked(response_schema=SCHEMA), OutputFormat(), "")
        assert mask is not None
        answer = json.loads(sampled(words, mask, seed))
        assert set(answer) == {"ok", "kind"}
        assert answer["kind"] in ("a", "b")


def test_the_mask_covers_the_models_logits_and_ends(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    mask = structured.mask(asked(response_schema=SCHEMA), OutputFormat(), "")
    assert mask is not None
    assert mask.allowed().shape == (VOCAB_SIZE,)
    assert not mask.allowed()[END]
    for token_id in words.encode('{"ok": true, "kind": "a"}').ids:
        mask.accept(token_id)
    assert mask.allowed().nonzero()[0].tolist() == [END]


def test_a_token_outside_the_mask_is_an_error(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    mask = structured.mask(asked(response_schema=SCHEMA), OutputFormat(), "")
    assert mask is not None
    with pytest.raises(EngineFailure) as caught:
        mask.accept(words.token_to_id("x"))
    assert "<state>" not in caught.value.message


def accepts(words: Tokenizer, mask: TokenMask | None, text: str) -> bool:
    """Whether the text can be written under the mask, and the answer end there."""
    assert mask is not None
    for token_id in words.encode(text).ids:
        if not mask.allowed()[token_id]:
            return False
        mask.accept(token_id)
    return bool(mask.allowed()[END])


def test_thinking_comes_before_what_is_constrained(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    request, output = asked(response_schema=SCHEMA), OutputFormat(reasoning=THINK)
    good = '{"ok": true, "kind": "a"}'
    assert accepts(words, structured.mask(request, output, "<think>\n"), "Hm {not json.\n</think>\n\n" + good)
    assert not accepts(words, structured.mask(request, output, "<think>\n"), "Hm.")
    assert accepts(words, structured.mask(request, output, "assistant\n"), "<think>Hm.</think>\n" + good)
    assert accepts(words, structured.mask(request, output, "assistant\n"), good)
    assert not accepts(words, structured.mask(request, output, "</think>\n\n"), "<think>Hm.</think>\n" + good)


def test_any_json_object(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    request = asked(response_schema={"type": "object"})
    assert accepts(words, structured.mask(request, OutputFormat(), ""), '{"x": [1, {"y": null}]}')
    assert not accepts(words, structured.mask(request, OutputFormat(), ""), "[1]")


FORMATS = [tools for tools in ToolFormat if tools is not ToolFormat.NONE]
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)


def calls_in(text: str, request: TurnRequest, output: OutputFormat) -> list[tuple[str, Any]]:
    numbers = itertools.count()
    parser = make_parser(output, request, "", lambda: f"id{next(numbers)}")
    events = parser.push(text)
    last, reason = parser.finish(FinishReason.STOP)
    assert not [event for event in events + last if isinstance(event, TextDelta | ReasoningDelta)]
    assert reason is FinishReason.TOOL_CALLS
    calls = [event for event in events + last if isinstance(event, ToolCallDelta)]
    return [(str(call.name), json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("tools", FORMATS)
def test_a_forced_call_parses_as_one(made: tuple[Tokenizer, StructuredOutput], tools: ToolFormat) -> None:
    words, structured = made
    output = OutputFormat(tools)
    for seed in range(3):
        request = asked(tools=TOOLS, tool_choice=REQUIRED, parallel_tool_calls=seed > 0)
        mask = structured.mask(request, output, "")
        assert mask is not None
        calls = calls_in(sampled(words, mask, seed), request, output)
        assert len(calls) == 1 or request.parallel_tool_calls
        for name, arguments in calls:
            assert name in ("look", "push")
            assert "on" in arguments
            assert set(arguments) <= {"on", "size"}


@pytest.mark.parametrize("tools", FORMATS)
def test_a_named_call_is_to_that_tool(made: tuple[Tokenizer, StructuredOutput], tools: ToolFormat) -> None:
    words, structured = made
    request = asked(tools=TOOLS, tool_choice=ToolChoice(ToolChoiceMode.NAMED, "push"), parallel_tool_calls=False)
    mask = structured.mask(request, OutputFormat(tools), "")
    assert mask is not None
    assert [name for name, _ in calls_in(sampled(words, mask, 7), request, OutputFormat(tools))] == ["push"]


@pytest.mark.parametrize("name", ["wetter_für_städte", "天气", "मौसम", "mcp.files:read/all-2"])
@pytest.mark.parametrize("tools", FORMATS)
def test_a_tool_may_be_named_in_any_script(
    made: tuple[Tokenizer, StructuredOutput], tools: ToolFormat, name: str
) -> None:
    words, structured = made
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "name": name}}
    request = asked(tools=[tool], tool_choice=REQUIRED, parallel_tool_calls=False)
    mask = structured.mask(request, OutputFormat(tools), "")
    assert mask is not None
    assert [called for called, _ in calls_in(sampled(words, mask, 1), request, OutputFormat(tools))] == [name]


ODD_NAMES = ["a b", "a@b", "f()", "x😀", 'quo"te', "a>b", "f{}", "a:b", "two\nlines", " a ", "n" * 300]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("tools", FORMATS)
def test_any_declared_name_is_forced_and_parsed(
    made: tuple[Tokenizer, StructuredOutput], tools: ToolFormat, name: str
) -> None:
    """Of tools and of their parameters, beside one that begins with that name."""
    words, structured = made
    schema = {"type": "object", "properties": {name: {"enum": [1]}}, "required": [name], "additionalProperties": False}
    declared = [
        {"type": "function", "function": {"name": called, "parameters": schema}} for called in (name, name + "2")
    ]
    request = asked(tools=declared, tool_choice=ToolChoice(ToolChoiceMode.NAMED, name), parallel_tool_calls=False)
    mask = structured.mask(request, OutputFormat(tools), "")
    assert mask is not None
    text = sampled(words, mask, 1)
    if tools is ToolFormat.GEMMA:  # its grammar leaves the values free
        text = text[: text.rindex(name + ":") + len(name) + 1] + "1}<tool_call|>"
    assert calls_in(text, request, OutputFormat(tools)) == [(name, {name: 1})]


def test_keywords_that_promise_nothing_are_dropped_unless_the_tool_is_strict(
    made: tuple[Tokenizer, StructuredOutput],
) -> None:
    _, structured = made
    parts: list[dict[str, Any]] = [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "multipleOf": 4000001},
        {"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}},
        {"anyOf": [{"type": "string", "pattern": "(?<!a)b"}, {"type": "null"}]},
    ]
    for part in parts:
        parameters = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        request = asked(tools=[tool], tool_choice=REQUIRED)
        assert structured.mask(request, OutputFormat(ToolFormat.HERMES), "") is not None
        with pytest.raises(InvalidRequest):
            structured.mask(
                dataclasses.replace(request, strict_tools=frozenset({"f"})), OutputFormat(ToolFormat.HERMES), ""
            )


def test_a_parameter_may_refer_to_definitions_in_every_format(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    items = {"type": "array", "items": {"$ref": "#/$defs/one"}, "minItems": 1, "maxItems": 1}
    parameters = {"type": "object", "properties": {"a": items}, "required": ["a"], "$defs": {"one": {"const": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {**parameters, "additionalProperties": False}}}
    for tools in (ToolFormat.HERMES, ToolFormat.QWEN_XML):
        request = asked(tools=[tool], tool_choice=REQUIRED, parallel_tool_calls=False)
        mask = structured.mask(request, OutputFormat(tools), "")
        assert mask is not None
        assert calls_in(sampled(words, mask, 2), request, OutputFormat(tools)) == [("f", {"a": [1]})]


FORMS = [
    (TextForm(FormKind.REGEX, "[0-9]{2}/[ab]+", "regex"), ["12/ab", "00/b"], ["1/a", "12/", "12/ab."]),
    (TextForm(FormKind.REGEX, r"a\/b\n|c", "regex"), ["a/b\n", "c"], ["a/b", "d"]),
    (
        TextForm(FormKind.CHOICE, ("yes", 'n"o\n', "yesterday"), "guided_choice"),
        ["yes", 'n"o\n', "yesterday"],
        ["y", "no"],
    ),
    (TextForm(FormKind.GRAMMAR, 'root ::= "a" item+\nitem ::= [0-9] | "x"', "grammar"), ["a1", "ax9x"], ["a", "1"]),
    (TextForm(FormKind.GRAMMAR, 'start: "a" B?\nB: /b+/', "grammar"), ["a", "abb"], ["b", "aa"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_a_form_that_is_not_json_is_held(
    made: tuple[Tokenizer, StructuredOutput], form: TextForm, good: list[str], bad: list[str]
) -> None:
    words, structured = made
    for request, head in (
        (asked(response_form=form), "<think>Hm.</think>\n"),
        (asked(response_form=form, prompt="x"), ""),
    ):
        output = OutputFormat(reasoning=THINK)
        for text in good:
            assert accepts(words, structured.mask(request, output, ""), head + text), text
        for text in bad:
            assert not accepts(words, structured.mask(request, output, ""), head + text), text
    assert not accepts(
        words, structured.mask(asked(response_form=form, prompt="x"), output, ""), "<think>Hm.</think>\n" + good[0]
    )


@pytest.mark.parametrize(
    "form",
    [
        TextForm(FormKind.REGEX, "(?=a)b", "guided_regex"),
        TextForm(FormKind.GRAMMAR, "root ::= nothing", "grammar"),
        TextForm(FormKind.GRAMMAR, "root ::= (", "grammar"),
        TextForm(FormKind.GRAMMAR, "hello", "grammar"),
    ],
)
def test_a_form_that_cannot_be_enforced_is_refused_by_its_field(
    made: tuple[Tokenizer, StructuredOutput], form: TextForm
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made[1].mask(asked(response_form=form), OutputFormat(), "")
    assert caught.value.param == form.param


CALL_TEXTS = {
    ToolFormat.HARMONY: '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"on": true}',
    ToolFormat.HERMES: '<tool_call>\n{"name": "NAME", "arguments": {"on": true}}\n</tool_call>',
    ToolFormat.QWEN_XML: (
        "<tool_call>\n<function=NAME>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>"
    ),
    ToolFormat.LLAMA: '{"name": "NAME", "parameters": {"on": true}}',
    ToolFormat.GEMMA: "<|tool_call>call:NAME{on:true}<tool_call|>",
    ToolFormat.DEEPSEEK: f'{CALLS_BEGIN}{CALL_BEGIN}NAME{SEPARATOR}{{"on": true}}{CALL_END}{CALLS_END}',
}


@pytest.mark.parametrize("tools", CALL_TEXTS)
@pytest.mark.parametrize("mode", [ToolChoiceMode.AUTO, ToolChoiceMode.REQUIRED])
def test_only_allowed_tools_can_be_called(
    made: tuple[Tokenizer, StructuredOutput], tools: ToolFormat, mode: ToolChoiceMode
) -> None:
    words, structured = made
    output = OutputFormat(tools)
    request = asked(tools=TOOLS, tool_choice=ToolChoice(mode, allowed=frozenset({"push"})))
    call = CALL_TEXTS[tools]
    assert accepts(words, structured.mask(request, output, ""), call.replace("NAME", "push"))
    assert not accepts(words, structured.mask(request, output, ""), call.replace("NAME", "look"))
    is_free = mode is ToolChoiceMode.AUTO
    text = "<|channel|>final<|message|>" if tools is ToolFormat.HARMONY else ""
    assert accepts(words, structured.mask(request, output, ""), text + "No {call} is < needed.") == is_free
    assert not accepts(words, structured.mask(request, output, ""), text + "So: " + call.replace("NAME", "look")) or (
        tools is ToolFormat.LLAMA  # which is a call at the beginning only
    )


@pytest.fixture(scope="module")
def harmony() -> tuple[Tokenizer, StructuredOutput]:
    words = tokenizer(special=False)
    words.add_special_tokens([AddedToken(mark, normalized=False) for mark in (CHANNEL, CONSTRAIN, MESSAGE, START)])
    words.add_special_tokens([AddedToken("<|over|>", normalized=False)])
    return words, StructuredOutput(words.to_str(), VOCAB_SIZE, frozenset({words.token_to_id("<|over|>")}))


def test_what_harmony_must_obey_is_its_final_message_or_a_call(harmony: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = harmony
    over = words.token_to_id("<|over|>")
    output = OutputFormat(ToolFormat.HARMONY, ANALYSIS_MARKS)
    thought = "<|channel|>analysis<|message|>Hm {not json.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"on": true}'
    good = '<|channel|>final<|message|>{"ok": true, "kind": "a"}'
    told = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"

    def can_say(text: str, **changes: Any) -> bool:
        mask = structured.mask(asked(**changes), output, "<|start|>assistant")
        assert mask is not None
        for token_id in words.encode(text).ids:
            if not mask.allowed()[token_id]:
                return False
            mask.accept(token_id)
        return bool(mask.allowed()[over])

    assert can_say(thought + good, response_schema=SCHEMA)
    assert can_say(good, response_schema=SCHEMA)
    assert not can_say('{"ok": true, "kind": "a"}', response_schema=SCHEMA)
    assert not can_say(thought + "<|channel|>final<|message|>Yes.", response_schema=SCHEMA)
    assert not can_say(thought.removesuffix("<|start|>assistant") + good, response_schema=SCHEMA)
    assert can_say(thought + call, response_schema=SCHEMA, tools=TOOLS)
    assert can_say(thought + call, tools=TOOLS, tool_choice=REQUIRED)
    assert not can_say(thought + good, tools=TOOLS, tool_choice=REQUIRED)
    some = ToolChoice(allowed=frozenset({"look"}))
    assert can_say(thought + told + call, tools=TOOLS, tool_choice=some)
    assert can_say(good, tools=TOOLS, tool_choice=some)
    assert not can_say(told + call.replace("look", "push"), tools=TOOLS, tool_choice=some)


def test_a_choice_of_no_tool_leaves_text(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    request = asked(tools=TOOLS, tool_choice=ToolChoice(allowed=frozenset()))
    output = OutputFormat(ToolFormat.HERMES)
    assert accepts(words, structured.mask(request, output, ""), "Hi <there>.")
    assert not accepts(
        words, structured.mask(request, output, ""), CALL_TEXTS[ToolFormat.HERMES].replace("NAME", "look")
    )


def test_a_schema_leaves_room_for_tools(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    request, output = asked(tools=TOOLS, response_schema=SCHEMA), OutputFormat(ToolFormat.HERMES)
    call = '<tool_call>\n{"name": "look", "arguments": {"on": true}}\n</tool_call>'
    assert accepts(words, structured.mask(request, output, ""), call)
    assert accepts(words, structured.mask(request, output, ""), '{"ok": true, "kind": "b"}')
    no_tools = asked(tools=TOOLS, response_schema=SCHEMA, tool_choice=ToolChoice(ToolChoiceMode.NONE))
    assert not accepts(words, structured.mask(no_tools, output, ""), call)


def test_free_answers_have_no_mask(made: tuple[Tokenizer, StructuredOutput]) -> None:
    assert made[1].mask(asked(tools=TOOLS), OutputFormat(ToolFormat.HERMES), "") is None


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "foo"}, "schema"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "schema.properties.a"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"format": "zip", "type": "string"}]}},
         "schema.items.anyOf[1]"),
        ({"$defs": {"d": {"type": "bar"}}, "$ref": "#/$defs/d"}, "schema.$defs.d"),
        ({"$defs": {"d": {"type": "null"}}, "type": "object",
          "properties": {"good": {"$ref": "#/$defs/d"}, "bad": {"not": {}}}}, "schema.properties.bad"),
        ({"$ref": "#/nowhere"}, "schema"),
        ({"$ref": "#"}, "schema"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_part(
    made: tuple[Tokenizer, StructuredOutput], schema: dict[str, Any], part: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made[1].mask(asked(response_schema=schema), OutputFormat(), "")
    assert caught.value.param == part


WIDE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(3000)}}
LATE = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "more": WIDE}, "required": ["kind", "more"]}
ALTERNATIVES = {"anyOf": [{"type": "object", "properties": {"a": {}, f"k{index}": {}}} for index in range(2500)]}
WIDE_TOOL = {"type": "function", "function": {"name": "wide", "parameters": WIDE}}


@pytest.mark.parametrize(
    ("refused", "param"),
    [
        (TurnRequest(response_schema=WIDE), "response_format"),
        (TurnRequest(response_schema=ALTERNATIVES), "response_format"),
        (TurnRequest(response_schema={"type": "string", "pattern": "^(a{1000}){1000}$"}), "response_format"),
        (TurnRequest(tools=[*TOOLS, WIDE_TOOL], tool_choice=REQUIRED), "tools[2]"),
        (TurnRequest(tools=[*TOOLS, WIDE_TOOL], tool_choice=ToolChoice(ToolChoiceMode.NAMED, "wide")), "tools[2]"),
        (TurnRequest(tools=[*TOOLS, WIDE_TOOL], response_schema=SCHEMA), "tools[2]"),
    ],
)
@pytest.mark.parametrize("output", [OutputFormat(ToolFormat.HERMES), OutputFormat(ToolFormat.QWEN_XML, THINK)])
def test_a_limit_that_shows_at_once_is_refused(
    made: tuple[Tokenizer, StructuredOutput], refused: TurnRequest, param: str, output: OutputFormat
) -> None:
    """Also where the answer begins with something else: thinking, or a choice among tools."""
    with pytest.raises(SchemaTooComplex, match="Simplify it") as caught:
        made[1].mask(refused, output, "")
    assert caught.value.param == param
    assert "<state>" not in caught.value.message
    assert "left-recursive" not in caught.value.message


def test_a_tool_that_refers_to_itself_without_end_is_refused(made: tuple[Tokenizer, StructuredOutput]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"$ref": "#"}}}
    with pytest.raises(SchemaTooComplex, match="refers to itself without end"):
        made[1].mask(asked(tools=[tool], tool_choice=REQUIRED), OutputFormat(ToolFormat.HERMES), "")


def test_a_limit_met_later_is_no_fault_of_the_engine(made: tuple[Tokenizer, StructuredOutput]) -> None:
    words, structured = made
    mask = structured.mask(asked(response_schema=LATE), OutputFormat(), "")
    with pytest.raises(SchemaTooComplex, match="Simplify it"):
        accepts(words, mask, '{"kind": "a", "more": {"p1": "x"}}')


def test_divisors_without_bound_are_refused(made: tuple[Tokenizer, StructuredOutput]) -> None:
    large = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 4_000_037}}}
    tool = {"type": "function", "function": {"name": "count", "parameters": large}}
    for request, param in (
        (asked(response_schema=large), "response_format"),
        (asked(tools=[tool], tool_choice=REQUIRED, strict_tools=frozenset({"count"})), "tools[0]"),
    ):
        with pytest.raises(InvalidRequest, match="multipleOf") as caught:
            made[1].mask(request, OutputFormat(ToolFormat.HERMES), "")
        assert caught.value.param == param


@pytest.mark.parametrize(("given", "tools"), [((), ToolFormat.HERMES), (TOOLS, ToolFormat.NONE)])
def test_a_forced_call_without_tools_is_refused(
    made: tuple[Tokenizer, StructuredOutput], given: Any, tools: ToolFormat
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made[1].mask(asked(tools=given, tool_choice=REQUIRED), OutputFormat(tools), "")
    assert caught.value.param == "tool_choice"


def test_one_tokenizer_is_built_whoever_comes_first() -> None:
    words = tokenizer(special=True)
    structured = StructuredOutput(words.to_str(), VOCAB_SIZE, frozenset({END}))
    structured.prepare()
    built = structured._tokenizer
    structured.prepare()
    assert structured._tokenizer is built
    opening, closing = words.token_to_id("<think>"), words.token_to_id("</think>")
    assert structured._terms("a<think> b\n</think>") == f'"a" <[{opening}]> " b\\n" <[{closing}]>'
