"""Sampling parameters and constraints as fields of `/completion`.

    penalties -> top_k -> temperature -> top_p -> min_p       chooses as parkd's own engine does

Every field is sent, so that the server's own defaults have no effect. All penalties cover prompt and answer, since the
server's do.

What the server does for each token costs time in proportion to the tokens that are still candidates: up to a
millisecond for 50,000. So samplers that change nothing are left out, top_k comes before the temperature, which does not
change who is among the first k, and a greedy choice is a top_k of 1.
"""

from __future__ import annotations

import math
from typing import Any

from parkd.errors import InvalidRequest
from parkd.types import FormKind, SamplingParams, TextForm, ToolChoiceMode, TurnRequest

GREEDY_TOP_K = 1
ANY_OBJECT = {"type": "object"}
"""What `json_object` asks for."""
OBJECT_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (pair (", " pair)*)? "}"
pair   ::= string ": " value
array  ::= "[" (value (", " value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" hex hex hex hex))* "\""
hex    ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""
"""Any object, with the one spacing that parkd's own engines allow. The server's own grammar for it also allows line
breaks and spaces between the parts, so that the same model would answer otherwise."""
SEED_MODULUS = 0xFFFFFFFF
"""A llama-server's seeds have 32 bits, and this value means a random seed."""


def sampling_fields(sampling: SamplingParams, context_tokens: int, fresh_seed: int) -> dict[str, Any]:
    seed = fresh_seed if sampling.seed is None else sampling.seed
    return {
        "samplers": _samplers(sampling),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.temperature else GREEDY_TOP_K,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": seed % SEED_MODULUS,
        "logit_bias": [
            [token_id, False if bias == -math.inf else bias] for token_id, bias in sampling.logit_bias.items()
        ],
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "ignore_eos": sampling.ignore_eos,
        "n_probs": 0,
    }


def _samplers(sampling: SamplingParams) -> list[str]:
    """Those that change who is drawn, in the order of the server's chain."""
    penalties = (sampling.repetition_penalty != 1, sampling.presence_penalty, sampling.frequency_penalty)
    wanted = {
        "penalties": any(penalties),
        "top_k": not sampling.temperature or sampling.top_k > 0,
        "temperature": sampling.temperature > 0,
        "top_p": sampling.temperature > 0 and sampling.top_p < 1,
        "min_p": sampling.temperature > 0 and sampling.min_p > 0,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def check_enforceable(request: TurnRequest, *, thinks: bool) -> None:
    """Raises InvalidRequest if the answer must obey what the server cannot enforce.

    `thinks`: the answer begins, or may begin, with thinking. The server's grammars apply from the first token, so they
    cannot be used after thinking, nor for calls in the model's own format.
    """
    if request.sampling.top_logprobs is not None:
        raise InvalidRequest(
            "`logprobs` cannot be had from a llama-server, which leaves out those of tokens that end inside a "
            "character. Leave it out, or let parkd run the GGUF file itself (--model).",
            param="logprobs",
        )
    if request.sampling.min_tokens:
        raise InvalidRequest(
            "`min_tokens` cannot be enforced on a llama-server. Send `ignore_eos` with a limit, which it can.",
            param="min_tokens",
        )
    mode = request.tool_choice.mode
    if mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
        raise InvalidRequest(
            "`tool_choice` forces a call, which cannot be enforced on a llama-server. Use `auto`.",
            param="tool_choice",
        )
    form = request.response_form
    if request.tool_choice.allowed is not None and mode is ToolChoiceMode.AUTO:
        raise InvalidRequest(
            "`allowed_tools` cannot be enforced on a llama-server. Send only those tools.", param="tool_choice"
        )
    if request.sampling.ignore_eos and (form is not None or request.response_schema is not None):
        raise InvalidRequest(
            "`ignore_eos` contradicts a form of the answer, which has an end. Send one of them.", param="ignore_eos"
        )
    if form is not None and form.kind is FormKind.REGEX:
        raise InvalidRequest(
            f"`{form.param}` cannot be enforced on a llama-server, whose grammars have no regular expressions. Send a "
            "`grammar` in its own form (GBNF), a choice or a JSON schema.",
            param=form.param,
        )
    if request.response_schema is None and form is None:
        return
    param = "response_format" if form is None else form.param
    if request.tools and mode is ToolChoiceMode.AUTO:
        raise InvalidRequest(
            "A response format and tools together cannot be enforced on a llama-server. Send one of them, or "
            "`tool_choice: none`.",
            param=param,
        )
    if thinks:
        raise InvalidRequest(
            "A response format cannot be enforced on a llama-server while the model thinks. Turn its thinking off "
            "(`reasoning_effort: none`).",
            param=param,
        )


def grammar_of(form: TextForm) -> str:
    """A grammar or a choice in llama.cpp's GBNF. What is wrong with a grammar, the server says."""
    if form.kind is FormKind.GRAMMAR:
        return str(form.source)
    return "root ::= " + " | ".join(map(_literal, form.source))


def _literal(text: str) -> str:
    """A text in a grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char >= " " else f"\\x{ord(char):02X}" for char in escaped) + '"'
