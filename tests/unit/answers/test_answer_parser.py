"""What models write, in every family's format, and what comes out of it however it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.answers.base import OutputFormat, ReasoningMarks, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.harmony import ANALYSIS_MARKS
from parkd.answers.parser import make_parser
from parkd.answers.readers.deepseek_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, ToolChoice, ToolChoiceMode, TurnRequest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
            },
        },
    }
    for name in ("write", "look")
]

Answer = tuple[str, str, list[tuple[str, Any]], FinishReason]
"""Thinking, text, calls (name, arguments) and the reason."""


def request(**changes: Any) -> TurnRequest:
    return TurnRequest(**({"tools": TOOLS, "stream": True} | changes))


def parse(
    pieces: list[str],
    family: ToolFormat,
    *,
    marks: ReasoningMarks | None = None,
    tail: str = "",
    reason: FinishReason = FinishReason.STOP,
    **changes: Any,
) -> Answer:
    """The parser's events put together the way a client does it; checks what a client relies on."""
    counter = itertools.count()
    parser = make_parser(OutputFormat(family, marks), request(**changes), tail, lambda: f"id{next(counter)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    last, reason = parser.finish(reason)
    thinking, text = "", ""
    calls: list[list[str]] = []
    for event in events + last:
        match event:
            case ReasoningDelta(piece):
                assert piece
                thinking += piece
            case TextDelta(piece):
                assert piece
                text += piece
            case ToolCallDelta(index, call_id, name, arguments):
                if index == len(calls):
                    assert call_id == f"id{index}"
                    assert name is not None
                    calls.append([name, ""])
                else:
                    assert (index, call_id, name) == (len(calls) - 1, None, None)
                calls[-1][1] += arguments
    return thinking, text, [(name, arguments) for name, arguments in calls], reason


def values(answer: Answer) -> Answer:
    """The same with the arguments as values."""
    thinking, text, calls, reason = answer
    return thinking, text, [(name, json.loads(arguments)) for name, arguments in calls], reason


TRICKY = {"path": 'a "b" \\ {x}\n</tool_call>é', "count": -12, "deep": {"list": [1, 2.5e3, None, True], "no": {}}}
TRICKY_JSON = json.dumps(TRICKY, ensure_ascii=False)
CALLS = [("write", TRICKY), ("look", {})]

HERMES_TWO = (
    f'I look.\n<tool_call>\n{{"name": "write", "arguments": {TRICKY_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "look"}\n</tool_call>'
)
MISTRAL_ARRAY = f'I look.[TOOL_CALLS] [{{"name": "write", "arguments": {TRICKY_JSON}}}, {{"name": "look"}}]'
MISTRAL_NAMED = f"I look.[TOOL_CALLS]write[CALL_ID]a1B2c3D4e[ARGS]{TRICKY_JSON}[TOOL_CALLS]look[ARGS]{{}}"
LLAMA_TAG = f'<|python_tag|>{{"name": "write", "parameters": {TRICKY_JSON}}}; {{"name": "look", "parameters": {{}}}}'
LLAMA_BARE = (
    f'\n{{"type": "function", "name": "write", "parameters": {TRICKY_JSON}}};{{"name": "look", "parameters": "{{}}"}}'
)
XML_TWO = (
    'I look.\n<tool_call>\n<function=write>\n<parameter=path>\na "b" \\ {x}\n<tool>\n\n</parameter>\n'
    '<parameter=count>\n7\n</parameter>\n<parameter=deep>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=look>\n</function>\n</tool_call>"
)
GEMMA_TWO = (
    'I look.<|tool_call>call:write{path:<|"|>a "b" \\ {x}\n<|é<|"|>,count:-12,deep:{'
    'list:[1,2.5e3,null,true,<|"|>s<|"|>],no:{}}}<tool_call|><|tool_call>call:look{}<tool_call|>'
)
DEEPSEEK_FENCED = (
    f"I look.{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}write\n```json\n{TRICKY_JSON}\n```{CALL_END}\n"
    f"{CALL_BEGIN}function{SEPARATOR}look\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
)
DEEPSEEK = (
    f"I look.{CALLS_BEGIN}{CALL_BEGIN}write{SEPARATOR}{TRICKY_JSON}{CALL_END}"
    f"{CALL_BEGIN}look{SEPARATOR}{{}}{CALL_END}{CALLS_END}"
)
GEMMA_CALLS = [
    ("write", {"path": 'a "b" \\ {x}\n<|é', "count": -12, "deep": {"list": [1, 2500.0, None, True, "s"], "no": {}}}),
    ("look", {}),
]
XML_CALLS = [("write", {"path": 'a "b" \\ {x}\n<tool>\n', "count": 7, "deep": {"a": [1]}}), ("look", {})]

HARMONY = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.write "
    f"<|constrain|>json<|message|>{TRICKY_JSON}<|call|>"
)
HARMONY_OF_TEMPLATE = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.write<|channel|>commentary json"
    f"<|message|>{TRICKY_JSON}<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{{}}"
)

GLM_TWO = """I look.
<tool_call>write
<arg_key>path</arg_key>
<arg_value>a <b> </arg_valu
c</arg_value>
<arg_key>count</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>look</tool_call>"""
MINIMAX_TWO = """I look.
<minimax:tool_call>
<invoke name="write">
<parameter name="path">a <b> </parameter
c</parameter>
<parameter name="count">3</parameter>
</invoke>
<invoke name="look">
</invoke>
</minimax:tool_call>"""
NEMOTRON_TWO = (
    f'I look.\n<TOOLCALL>[{{"name": "write", "arguments": {TRICKY_JSON}}}, '
    '{"name": "look", "arguments": {}}]</TOOLCALL>'
)
KIMI_TWO = (
    f"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{TRICKY_JSON}"
    "<|tool_call_end|><|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
SEED_TWO = (
    "I look.\n<seed:tool_call>\n<function=write>\n<parameter=path>\na <b>\n</parameter>\n"
    "<parameter=count>7</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=look>\n</function>\n</seed:tool_call>"
)
PYTHON_TWO = (
    "I look.<|tool_call_start|>[write(path='it's \"b\" \\\\ {x}, ok\\n\n', count=-12, "
    "deep={'list': [1, 2.5e3, None, True, 's'], "
    '"no": {}}), look()]<|tool_call_end|>'
)
PYTHON_CALLS = [
    (
        "write",
        {"path": 'it\'s "b" \\ {x}, ok\n\n', "count": -12, "deep": {"list": [1, 2500.0, None, True, "s"], "no": {}}},
    ),
    ("look", {}),
]
GOOD = {
    "nemotron": (ToolFormat.NEMOTRON, NEMOTRON_TWO, "I look.", CALLS),
    "kimi": (ToolFormat.KIMI, KIMI_TWO, "I look.", CALLS),
    "seed": (
        ToolFormat.SEED,
        SEED_TWO,
        "I look.",
        [("write", {"path": "\na <b>\n", "count": 7}), ("look", {})],
    ),
    "python": (ToolFormat.PYTHON, PYTHON_TWO, "I look.", PYTHON_CALLS),
    "python, quotes that the template does not escape": (
        ToolFormat.PYTHON,
        "<|tool_call_start|>[write(path='echo 'y'')]<|tool_call_end|>",
        "",
        [("write", {"path": "echo 'y'"})],
    ),
    "hermes": (ToolFormat.HERMES, HERMES_TWO, "I look.", CALLS),
    "mistral array": (ToolFormat.MISTRAL, MISTRAL_ARRAY, "I look.", CALLS),
    "mistral named": (ToolFormat.MISTRAL, MISTRAL_NAMED, "I look.", CALLS),
    "llama tag": (ToolFormat.LLAMA, LLAMA_TAG, "", CALLS),
    "llama bare": (ToolFormat.LLAMA, LLAMA_BARE, "", CALLS),
    "qwen xml": (ToolFormat.QWEN_XML, XML_TWO, "I look.", XML_CALLS),
    "qwen xml, json inside": (ToolFormat.QWEN_XML, HERMES_TWO, "I look.", CALLS),
    "qwen xml, untagged": (
        ToolFormat.QWEN_XML,
        XML_TWO.replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
        "I look.",
        XML_CALLS,
    ),
    "deepseek": (ToolFormat.DEEPSEEK, DEEPSEEK, "I look.", CALLS),
    "deepseek fenced": (ToolFormat.DEEPSEEK_FENCED, DEEPSEEK_FENCED, "I look.", CALLS),
    "deepseek, no end": (ToolFormat.DEEPSEEK, DEEPSEEK.removesuffix(CALLS_END), "I look.", CALLS),
    "harmony": (ToolFormat.HARMONY, HARMONY, "I look.", CALLS[:1]),
    "harmony as its template writes": (ToolFormat.HARMONY, HARMONY_OF_TEMPLATE, "I look.", CALLS),
    "harmony, no type": (
        ToolFormat.HARMONY,
        "<|channel|>commentary to=functions.look<|message|> {}<|call|>",
        "",
        CALLS[1:],
    ),
    "glm": (
        ToolFormat.GLM,
        GLM_TWO,
        "I look.",
        [("write", {"path": "a <b> </arg_valu\nc", "count": 3}), ("look", {})],
    ),
    "glm in one line": (
        ToolFormat.GLM,
        '<tool_call>look<arg_key>deep</arg_key><arg_value>{"a": [1]}</arg_value></tool_call>',
        "",
        [("look", {"deep": {"a": [1]}})],
    ),
    "minimax": (
        ToolFormat.MINIMAX,
        MINIMAX_TWO,
        "I look.",
        [("write", {"path": "a <b> </parameter\nc", "count": 3}), ("look", {})],
    ),
    "gemma": (ToolFormat.GEMMA, GEMMA_TWO, "I look.", GEMMA_CALLS),
    "function gemma": (
        ToolFormat.GEMMA,
        "<start_function_call>call:write{path:<escape>a,b}<escape>}<end_function_call>",
        "",
        [("write", {"path": "a,b}"})],
    ),
}

BAD = {
    "nemotron prose": (ToolFormat.NEMOTRON, "<TOOLCALL>I would rather not.</TOOLCALL>"),
    "nemotron no list": (ToolFormat.NEMOTRON, '<TOOLCALL>{"name": "write", "arguments": {}}</TOOLCALL>'),
    "kimi prose": (ToolFormat.KIMI, "<|tool_calls_section_begin|>I would rather not.<|tool_calls_section_end|>"),
    "kimi bad name": (
        ToolFormat.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>two words:0<|tool_call_argument_begin|>{}",
    ),
    "seed prose": (ToolFormat.SEED, "<seed:tool_call>I would rather not.</seed:tool_call>"),
    "python prose": (ToolFormat.PYTHON, "<|tool_call_start|>I would rather not.<|tool_call_end|>"),
    "python bad name": (ToolFormat.PYTHON, "<|tool_call_start|>[two words(a=1)]<|tool_call_end|>"),
    "hermes not json": (ToolFormat.HERMES, 'So: <tool_call>{"name": write}</tool_call> done'),
    "hermes no name": (ToolFormat.HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    "hermes arguments are a list": (ToolFormat.HERMES, '<tool_call>{"name": "write", "arguments": [1]}</tool_call>'),
    "hermes name is no name": (ToolFormat.HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "hermes empty": (ToolFormat.HERMES, "use <tool_call></tool_call> tags"),
    "hermes marker twice": (ToolFormat.HERMES, "<tool_call><tool_call>x"),
    "hermes half marker": (ToolFormat.HERMES, "a <tool_c"),
    "mistral prose": (ToolFormat.MISTRAL, "[TOOL_CALLS] I would rather not."),
    "mistral bad name": (ToolFormat.MISTRAL, "[TOOL_CALLS]two words[ARGS]{}"),
    "llama json answer": (ToolFormat.LLAMA, '{"name": "Ann", "parameters": {"age": 3}}'),
    "llama other json": (ToolFormat.LLAMA, '{"total": 3, "name": "write"}'),
    "llama code": (ToolFormat.LLAMA, "<|python_tag|>print(1)"),
    "xml no function": (ToolFormat.QWEN_XML, "<tool_call>\n<parameter=x>\n</tool_call>"),
    "deepseek prose": (ToolFormat.DEEPSEEK, f"{CALLS_BEGIN} I would rather not {{}}."),
    "deepseek bad name": (ToolFormat.DEEPSEEK, f"{CALLS_BEGIN}{CALL_BEGIN}two words{SEPARATOR}{{}}{CALL_END}"),
    "harmony without a header": (ToolFormat.HARMONY, "plainly said"),
    "harmony in prose": (ToolFormat.HARMONY, "say <|channel|>final in a header"),
    "harmony arguments are no object": (
        ToolFormat.HARMONY,
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>[1]",
    ),
    "harmony bad name": (ToolFormat.HARMONY, "<|channel|>commentary to=functions.two words more<|message|>{}"),
    "glm no name": (ToolFormat.GLM, "<tool_call>two words<arg_key>path</arg_key></tool_call>"),
    "glm value first": (ToolFormat.GLM, "<tool_call><arg_value>1</arg_value></tool_call>"),
    "minimax prose": (ToolFormat.MINIMAX, "<minimax:tool_call>I would rather not.</minimax:tool_call>"),
    "minimax empty": (ToolFormat.MINIMAX, "<minimax:tool_call></minimax:tool_call>"),
    "gemma prose": (ToolFormat.GEMMA, "<|tool_call>write it<tool_call|>"),
    "python constants": (ToolFormat.HERMES, '<tool_call>{"name": True}</tool_call>'),
}


TWICE = {
    "xml": (
        ToolFormat.QWEN_XML,
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>",
        "\n<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        ToolFormat.GLM,
        "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value>",
        "<arg_key>path</arg_key><arg_value>b</arg_value></tool_call>",
    ),
    "minimax": (
        ToolFormat.MINIMAX,
        '<minimax:tool_call><invoke name="write"><parameter name="path">a</parameter>',
        '<parameter name="path">b</parameter></invoke></minimax:tool_call>',
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", TWICE)
def test_an_argument_that_comes_twice_ends_the_call(name: str, stream: bool) -> None:
    """JSON with a key twice means something else to each reader of it. What follows is shown as it was written."""
    tools, call, rest = TWICE[name]
    expected = ("", rest, [("write", '{"path": "a"')], FinishReason.STOP)
    assert parse([call + rest], tools, stream=stream) == expected
    assert parse(list(call + rest), tools, stream=stream) == expected


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    places = st.lists(st.integers(0, len(text)), max_size=12).map(lambda found: sorted({0, len(text), *found}))
    return places.map(lambda found: [text[a:b] for a, b in itertools.pairwise(found)])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", GOOD)
def test_calls_come_out_of_every_format(name: str, stream: bool) -> None:
    tools, text, shown, calls = GOOD[name]
    expected = ("", shown, calls, FinishReason.TOOL_CALLS)
    assert values(parse([text], tools, stream=stream)) == expected
    assert values(parse(list(text), tools, stream=stream)) == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_call_is_returned_as_it_was_written(name: str, stream: bool) -> None:
    tools, text = BAD[name]
    expected = ("", text, [], FinishReason.STOP)
    assert parse([text], tools, stream=stream) == expected
    assert parse(list(text), tools, stream=stream) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cut_gives_the_same(data: st.DataObject) -> None:
    samples = [(tools, text) for tools, text, *_ in GOOD.values()] + list(BAD.values())
    tools, text = data.draw(st.sampled_from(samples))
    thought = data.draw(st.sampled_from(["", "<think>\n\n</think>\n\n", "<think>\nhm </thin k\n</think>\n\n"]))
    stop = data.draw(st.integers(0, len(thought + text)))
    cut_off = (thought + text)[:stop]
    stream = data.draw(st.booleans())
    whole = parse([cut_off], tools, marks=THINK, stream=stream)
    assert parse(data.draw(cuts(cut_off)), tools, marks=THINK, stream=stream) == whole


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=", "write>", "<parameter=", "path>", "</parameter>", "</function>",
    "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", '"name"', '"arguments"', ":", ",", '"write"', '"', "\\", "\\u12", "1",
    "-", "true", "<|python_tag|>", ";", "<|tool_call>", "call:write{", '<|"|>', "<tool_call|>", "<think>", "</think>",
    "\n", " ", "é", "word",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.sampled_from(ToolFormat),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_nonsense_never_raises_nor_depends_on_cuts(
    text: str, tools: ToolFormat, stream: bool, opened: bool, data: st.DataObject
) -> None:
    tail = "<think>\n" if opened else ""
    whole = parse([text], tools, marks=THINK, tail=tail, stream=stream)
    assert parse(data.draw(cuts(text)), tools, marks=THINK, tail=tail, stream=stream) == whole
    assert parse(list(text), tools, marks=THINK, tail=tail, stream=stream) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=12,
    ),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_any_json_arguments_arrive_unchanged(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"name": "look", "arguments": {"v": value}}, ensure_ascii=ascii_only, indent=indent)
    _, text, calls, _ = values(parse([f"<tool_call>{body}</tool_call>"], ToolFormat.HERMES))
    assert text == ""
    assert calls == [("look", {"v": value})]


def test_arguments_stream_before_the_call_ends() -> None:
    parser = make_parser(OutputFormat(ToolFormat.HERMES), request(), "", lambda: "id")
    head = parser.push('<tool_call>{"name": "write", "arguments": {"path": "abc')
    assert head == [ToolCallDelta(0, "id", "write", '{"path": "abc')]
    assert parser.push('def"') == [ToolCallDelta(0, arguments='def"')]
    xml = make_parser(OutputFormat(ToolFormat.QWEN_XML), request(), "", lambda: "id")
    head = xml.push("<tool_call><function=write><parameter=path>\nabc")
    assert head == [ToolCallDelta(0, "id", "write", '{"path": "abc')]


def test_a_call_that_breaks_after_its_head_keeps_what_was_sent() -> None:
    broken = '<tool_call>{"name": "write", "arguments": {"path": "x", oops}}</tool_call>'
    assert parse([broken], ToolFormat.HERMES) == (
        "",
        "oops}}</tool_call>",
        [("write", '{"path": "x", ')],
        FinishReason.STOP,
    )


def test_of_a_call_cut_by_the_limit_its_beginning_is_sent_and_no_markup() -> None:
    text = 'Now. <tool_call>{"name": "write", "arguments": {"path": "x'
    for end in range(len("Now. <tool_call>"), len(text) + 1):
        thinking, shown, calls, reason = parse([text[:end]], ToolFormat.HERMES, reason=FinishReason.LENGTH)
        arguments = text[:end].partition('"arguments": ')[2]
        assert (thinking, shown, reason) == ("", "Now.", FinishReason.LENGTH)
        assert calls == ([("write", arguments)] if arguments else [])


@pytest.mark.parametrize("mode", [ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED])
def test_of_an_answer_that_must_be_a_call_no_piece_of_a_marker_is_text(mode: ToolChoiceMode) -> None:
    """Vocabularies that spell `<tool_call>` in several tokens: an answer cut inside it was the text `<tool_`."""
    for text, last in (("<tool_call>", ""), ("<think>", ""), ("<think>\nSo.</think>\n<tool_call>", "So.")):
        for end in range(1, len(text) + 1):
            said = parse(
                list(text[:end]),
                ToolFormat.HERMES,
                marks=THINK,
                reason=FinishReason.LENGTH,
                tool_choice=ToolChoice(mode, "write"),
            )
            assert said[1:] == ("", [], FinishReason.LENGTH), text[:end]
        assert said[0] == last


def test_of_an_answer_that_must_be_json_no_piece_of_a_marker_is_text() -> None:
    schema = {"type": "object"}
    for form, shown in (({"response_schema": schema}, ""), ({}, "<thin")):
        said = parse(["<th", "in"], ToolFormat.NONE, marks=THINK, reason=FinishReason.LENGTH, tools=(), **form)
        assert said[1] == shown
    # Inside of it, such a piece is a string's.
    text = '{"a": "<tool_'
    for changes in ({"tools": ()}, {}):
        said = parse(
            [text], ToolFormat.HERMES, marks=THINK, reason=FinishReason.LENGTH, response_schema=schema, **changes
        )
        assert said[1] == text


def test_raw_newlines_in_json_strings_are_repaired() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"path": "a\nb\tc"}}</tool_call>'
    assert values(parse([text], ToolFormat.HERMES))[2] == [("write", {"path": "a\nb\tc"})]


def test_text_after_a_broken_call_may_hold_a_good_one() -> None:
    text = '<tool_call>{oops}</tool_call>\n<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert parse([text], ToolFormat.HERMES) == (
        "",
        "<tool_call>{oops}</tool_call>",
        [("look", "{}")],
        FinishReason.TOOL_CALLS,
    )


def test_blanks_belong_to_the_text_unless_a_call_follows() -> None:
    assert parse(["a \n", "\n b \n"], ToolFormat.HERMES)[1] == "a \n\n b \n"


@pytest.mark.parametrize("changes", [{"tools": ()}, {"tool_choice": ToolChoice(ToolChoiceMode.NONE)}])
def test_without_tools_calls_are_text(changes: dict[str, Any]) -> None:
    assert parse([HERMES_TWO], ToolFormat.HERMES, **changes)[1:] == (HERMES_TWO, [], FinishReason.STOP)


def test_one_call_only_when_the_client_wants_one() -> None:
    parser = make_parser(OutputFormat(ToolFormat.HERMES), request(parallel_tool_calls=False), "", lambda: "id")
    assert not parser.satisfied
    parser.push(HERMES_TWO)
    assert parser.satisfied
    assert values(parse([HERMES_TWO], ToolFormat.HERMES, parallel_tool_calls=False))[2] == CALLS[:1]


@pytest.mark.parametrize(
    ("text", "tail", "thinking", "shown"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "", "hm", "Yes."),
        ("\n<think>hm</think>Yes.", "", "hm", "Yes."),
        ("hm\n</think>\n\nYes.", "<|im_start|>assistant\n<think>\n", "hm", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "", "Yes."),
        ("Yes <think>no</think>", "", "", "Yes <think>no</think>"),
        ("Yes </think>", "<think>\n\n</think>\n\n", "", "Yes </think>"),
        ("a </think b", "<think>", "a </think b", ""),
        ("<thin", "", "", "<thin"),
    ],
)
def test_thinking_is_split_off(text: str, tail: str, thinking: str, shown: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, ToolFormat.NONE, marks=THINK, tail=tail)[:2] == (thinking, shown)


HARMONY_THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "thinking", "shown"),
    [
        (f"{HARMONY_THOUGHT}<|channel|>final<|message|>Yes.<|return|>", "Let me see.", "Yes."),
        (f"{HARMONY_THOUGHT}{HARMONY_THOUGHT}<|channel|>final<|message|>Yes.", "Let me see.\n\nLet me see.", "Yes."),
        (
            f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{HARMONY_THOUGHT}"
            "<|channel|>final<|message|>Yes.<|return|>",
            "Let me see.",
            "First.\n\nYes.",
        ),
        ("<|channel|>analysis<|message|>Let me", "Let me", ""),
        (f"{HARMONY_THOUGHT}<|channel|>fin", "Let me see.", ""),
        (f"{HARMONY_THOUGHT} and so on", "Let me see.", ""),
        ("<|channel|>analysis<|message|>I <|end of it", "I <|end of it", ""),
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_messages_of_harmony_are_told_apart(text: str, thinking: str, shown: str, tools: Any) -> None:
    for size in range(1, len(text)):
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        assert parse(pieces, ToolFormat.HARMONY, marks=ANALYSIS_MARKS, tools=tools)[:3] == (thinking, shown, [])


def test_of_a_harmony_call_that_is_not_wanted_the_text_is_shown_with_its_header() -> None:
    assert parse([HARMONY], ToolFormat.HARMONY, tools=())[1] == (
        f"I look.<|channel|>commentary to=functions.write <|constrain|>json<|message|>{TRICKY_JSON}"
    )


def test_thinking_is_known_while_it_lasts() -> None:
    parser = make_parser(OutputFormat(reasoning=THINK), request(), "<think>", lambda: "id")
    assert parser.in_reasoning
    assert parser.push("hm") == [ReasoningDelta("hm")]
    assert parser.push("</think>") == []
    assert not parser.in_reasoning


def test_closing_tags_may_be_missing() -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}\n<tool_call>{"name": "look", "arguments": {"a": 1}}\nBye.'
    assert parse([text], ToolFormat.HERMES)[1:3] == ("\nBye.", [("look", "{}"), ("look", '{"a": 1}')])


def test_an_answer_to_a_raw_prompt_is_text_as_it_is() -> None:
    text = "<think>hm</think>\n\nYes."
    assert parse([text], ToolFormat.HERMES, marks=THINK, prompt="x", tools=())[:2] == ("", text)
    assert parse([text], ToolFormat.HERMES, marks=THINK, tail="<think>", prompt="x", tools=())[:2] == ("", text)
