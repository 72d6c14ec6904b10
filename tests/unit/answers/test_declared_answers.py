"""Answers read by the template that a model's own files declare: our events against the library's whole parse."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import pytest
from parkd_engine.words.chat import ChatTokenizer
from parkd_engine.words.responses import ResponseTemplate
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parkd.answers.base import OutputEvent, OutputFormat
from parkd.answers.declared import DeclaredParser
from parkd.answers.parser import make_parser
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, ToolChoice, ToolChoiceMode, TurnRequest

CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
JSON_CALLS = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>", "repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": CALL,
        },
    },
}
NAMED_CALLS = {
    "start_anchor": "[/INST]",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"\[CALL\](?P<name>\w+)\[ARGS\]",
            "close": "[END]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
JSON_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = [
    (JSON_CALLS, JSON_PROMPT, "Just text, nothing else."),
    (JSON_CALLS, JSON_PROMPT, "<think>\nI think <b>so</b>.\n</think>\n\nYes & no.\n"),
    (JSON_CALLS, JSON_PROMPT + "<think>\n", "Opened for me.\n</think>\n\nDone"),
    (
        JSON_CALLS,
        JSON_PROMPT,
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"path": "a/b", "n": 2}}\n</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    ),
    (JSON_CALLS, JSON_PROMPT, "A < b, a <tool is no call and <thin is no thought"),
    (NAMED_CALLS, "[INST]x[/INST]", '[THINK]hm[/THINK]So:[CALL]look[ARGS]{"a": [1, "é"]}[END]'),
]


def request(**fields: Any) -> TurnRequest:
    return TurnRequest(messages=[{"role": "user", "content": "hi"}], tools=TOOLS, **fields)


def parser_of(spec: dict[str, Any], prompt: str, asked: TurnRequest) -> DeclaredParser:
    ids = count()
    output = OutputFormat(reader=ResponseTemplate(spec).reader)
    parser = make_parser(output, asked, prompt, lambda: f"call_{next(ids)}")
    assert isinstance(parser, DeclaredParser)
    return parser


def read(parser: DeclaredParser, pieces: list[str]) -> tuple[list[OutputEvent], FinishReason]:
    events = [event for piece in pieces for event in parser.push(piece)]
    rest, reason = parser.finish(FinishReason.STOP)
    return events + rest, reason


def texts(events: list[OutputEvent], kind: type[TextDelta | ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls(events: list[OutputEvent]) -> list[tuple[str | None, Any]]:
    return [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCallDelta)]


def cut(text: str, dice: random.Random) -> list[str]:
    places = sorted(dice.sample(range(1, len(text)), min(len(text) - 1, dice.randrange(12))))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("spec", "prompt", "answer"), ANSWERS)
def test_pieces_say_what_the_librarys_whole_parse_says(spec: dict[str, Any], prompt: str, answer: str) -> None:
    whole = library_tokenizer(spec).parse_response(answer, prefix=prompt, tools=TOOLS)
    dice = random.Random(7)
    for pieces in [[answer], list(answer), *(cut(answer, dice) for _ in range(40))]:
        events, reason = read(parser_of(spec, prompt, request()), pieces)
        assert texts(events, TextDelta) == (whole.get("content") or "")
        assert texts(events, ReasoningDelta) == (whole.get("reasoning_content") or whole.get("thinking") or "")
        told = [(call["function"]["name"], call["function"]["arguments"]) for call in whole.get("tool_calls", [])]
        assert calls(events) == told
        assert reason is (FinishReason.TOOL_CALLS if told else FinishReason.STOP)


def test_text_and_thinking_are_not_held_until_the_end() -> None:
    parser = parser_of(JSON_CALLS, JSON_PROMPT, request())
    assert parser.push("<think>one") == [ReasoningDelta("one")]
    assert parser.in_reasoning
    assert parser.push(" two") == [ReasoningDelta(" two")]
    assert parser.push("</think>\n\nthree") == [TextDelta("three")]
    assert not parser.in_reasoning


def test_thinking_that_the_prompt_opened_counts_as_thinking_from_the_first_token() -> None:
    assert parser_of(JSON_CALLS, JSON_PROMPT + "<think>\n", request()).in_reasoning
    assert not parser_of(JSON_CALLS, JSON_PROMPT, request()).in_reasoning


@pytest.mark.parametrize(
    "answer",
    [
        "So <tool_call>{not json}</tool_call> there",
        'So <tool_call>{"name": "look", "argu',
        'So <tool_call>{"name": 3, "arguments": {}}</tool_call>',
        'So <tool_call>["look"]</tool_call>',
    ],
)
def test_what_the_model_got_wrong_is_text(answer: str) -> None:
    for pieces in ([answer], list(answer)):
        events, reason = read(parser_of(JSON_CALLS, JSON_PROMPT, request()), pieces)
        assert not calls(events)
        assert reason is FinishReason.STOP
        assert "".join(texts(events, TextDelta).split()) == "".join(answer.split())


def test_calls_nobody_asked_for_are_text() -> None:
    answer = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    events, reason = read(
        parser_of(JSON_CALLS, JSON_PROMPT, request(tool_choice=ToolChoice(ToolChoiceMode.NONE))), [answer]
    )
    assert not calls(events)
    assert '{"name": "look"' in texts(events, TextDelta)
    assert reason is FinishReason.STOP


def test_one_call_is_enough_where_only_one_is_welcome() -> None:
    answer = '<tool_call>{"name": "look", "arguments": {}}</tool_call>' * 2
    parser = parser_of(JSON_CALLS, JSON_PROMPT, request(parallel_tool_calls=False))
    events, reason = read(parser, list(answer))
    assert len(calls(events)) == 1
    assert parser.satisfied
    assert reason is FinishReason.TOOL_CALLS


def test_a_prompt_end_without_the_turns_beginning_is_not_read_as_the_answer() -> None:
    events, _ = read(parser_of(JSON_CALLS, "some tail <think> of a prompt", request()), ["answer"])
    assert (texts(events, TextDelta), texts(events, ReasoningDelta)) == ("answer", "")


def library_tokenizer(spec: dict[str, Any] | None = None) -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|end|>", "[TOOL_CALLS]", "[CALL]", "<|im_start|>"]
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", response_template=spec)


@pytest.mark.parametrize(("spec", "shown"), [(None, "[TOOL_CALLS]a"), (NAMED_CALLS, "[TOOL_CALLS]a[CALL]")])
def test_marks_that_a_vocabulary_calls_special_are_in_an_answers_text(spec: dict[str, Any] | None, shown: str) -> None:
    """Else no call of such a model would ever be seen. Ends of turns and the like stay silent."""
    tokenizer = ChatTokenizer(library_tokenizer(spec))
    ids = tokenizer.encode("<|im_start|>[TOOL_CALLS]a[CALL]<|end|>")
    assert tokenizer.text().push(ids) == shown


def test_a_template_the_library_cannot_read_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = ChatTokenizer(library_tokenizer({"fields": {"content": {"open": ""}}}))
    assert tokenizer.responses is None
    assert "not used" in caplog.text


def test_another_chat_template_leaves_the_models_response_template_out() -> None:
    assert ChatTokenizer(library_tokenizer(JSON_CALLS)).responses is not None
    assert ChatTokenizer(library_tokenizer(JSON_CALLS), declares=False).responses is None


def test_found_by_use_10_a_declared_call_that_the_limit_cuts_is_no_markup() -> None:
    """What was written of the call was sent as text, with its marks."""
    open_mark, call = "<tool_call>", '<tool_call>\n{"name": "look", "arguments": {"path": "a/b"}}\n'
    for end in range(len(open_mark), len(call) + 1):
        parser = parser_of(JSON_CALLS, JSON_PROMPT, request())
        events = [event for piece in ("I look.\n", call[:end]) for event in parser.push(piece)]
        rest, reason = parser.finish(FinishReason.LENGTH)
        assert texts(events + rest, TextDelta).strip() == "I look.", end
        assert (calls(events + rest), reason) == ([], FinishReason.LENGTH)


def test_of_an_answer_that_must_be_a_call_no_piece_of_a_declared_marker_is_text() -> None:
    for mode, shown in ((ToolChoiceMode.REQUIRED, ""), (ToolChoiceMode.NAMED, ""), (ToolChoiceMode.AUTO, "<tool_")):
        parser = parser_of(JSON_CALLS, JSON_PROMPT, request(tool_choice=ToolChoice(mode, "look")))
        events = [event for piece in ("<to", "ol_") for event in parser.push(piece)]
        rest, reason = parser.finish(FinishReason.LENGTH)
        assert (texts(events + rest, TextDelta), reason) == (shown, FinishReason.LENGTH)
