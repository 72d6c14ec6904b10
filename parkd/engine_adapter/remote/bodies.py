"""Requests to a server: a turn as fields of `/v1/chat/completions` or `/v1/completions`. Pure.

What a server does not take is refused by name before the turn queues (`check_taken`), unless it refuses unknown fields
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from parkd.engine_adapter.remote.flavours import OPENAI_SAMPLING, Continues, Flavour
from parkd.engine_adapter.remote.talk import Talk
from parkd.errors import InvalidRequest
from parkd.types import FormKind, SamplingParams, TextForm, ToolChoiceMode, TurnRequest, Unit

_EXTRA_SAMPLING = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens")
_ALWAYS = ("temperature", "top_p")
"""Sent even if they have parkd's defaults, since a server's own may be others."""
_DEFAULTS = SamplingParams()
LEAST_OUTPUT = 1
"""Servers refuse to generate nothing. Of a turn that only has its prompt read, this many tokens are dropped."""
EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Those that servers know as a field of the request; a template may know others."""


def check_taken(request: TurnRequest, flavour: Flavour, unit: Unit, *, thinks: bool) -> None:
    """Raises InvalidRequest, which names the field, for what this kind of server cannot do. `thinks`: the answer may
    begin with thinking, which matters only where parkd itself reads the model's text."""
    here = f"a {flavour.name} server" if flavour.name else "this server"
    sampling = request.sampling
    for name in (*OPENAI_SAMPLING, *_EXTRA_SAMPLING):
        if getattr(sampling, name) != getattr(_DEFAULTS, name) and _field_for(name, flavour) is None:
            raise InvalidRequest(f"`{name}` cannot be passed on to {here}. Leave it out.", param=name)
    if sampling.top_logprobs is not None and (unit is Unit.CHARACTER or not flavour.scores):
        advice = "or start parkd with --tokenizer" if flavour.scores else "or let parkd run the model itself (--model)"
        raise InvalidRequest(
            f"`logprobs` are not passed on from {here} like this. Leave it out, {advice}.", param="logprobs"
        )
    if sampling.text_bias and unit is Unit.CHARACTER:
        raise InvalidRequest(
            "`logit_bias` by texts needs the model's tokenizer, which is not known here. Send ids of tokens, or start "
            "parkd with --tokenizer.",
            param="logit_bias",
        )
    choice = request.tool_choice
    forced = choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    if forced and (not flavour.forces_calls or unit is Unit.TOKEN):
        raise InvalidRequest(
            f"`tool_choice` forces a call, which cannot be enforced on {here}. Use `auto`.", param="tool_choice"
        )
    if choice.allowed is not None and choice.mode is not ToolChoiceMode.NONE:
        raise InvalidRequest(
            f"`allowed_tools` cannot be enforced on {here}. Send only those tools.", param="tool_choice"
        )
    form = request.response_form
    if form is not None and form.kind not in flavour.forms:
        raise InvalidRequest(
            f"`{form.param}` cannot be enforced on {here}. Use a JSON schema (`response_format`), or leave it out.",
            param=form.param,
        )
    if request.response_schema is not None and not flavour.schemas:
        raise InvalidRequest(f"A response format cannot be enforced on {here}. Leave it out.", param="response_format")
    if unit is Unit.TOKEN and (form is not None or request.response_schema is not None):
        param = "response_format" if form is None else form.param
        if thinks:
            raise InvalidRequest(
                "A form of the answer cannot be enforced while the model thinks, since the server does not know where "
                "its thinking ends. Turn its thinking off (`reasoning_effort: none`).",
                param=param,
            )
        if request.tools and choice.mode is ToolChoiceMode.AUTO:
            raise InvalidRequest(
                "A form of the answer and tools together cannot be enforced on this server. Send one of them, or "
                "`tool_choice: none`.",
                param=param,
            )
    if request.continues and unit is Unit.CHARACTER and flavour.continues is Continues.NO:
        raise InvalidRequest(
            f"The last message begins the answer, and {here} cannot go on with it. Let the last message be the user's.",
            param="messages",
        )
    if not request.opens_answer and unit is Unit.CHARACTER and flavour.continues is not Continues.BY_FIELDS:
        raise InvalidRequest(
            f"`add_generation_prompt` cannot be passed on to {here}. Leave it out.", param="add_generation_prompt"
        )


def _field_for(name: str, flavour: Flavour) -> str | None:
    """The server's name for a way to sample; None if it has none."""
    if name in OPENAI_SAMPLING:
        return None if name in flavour.lacks else name
    return name if flavour.sampling is None else flavour.sampling.get(name)


def sampling_fields(sampling: SamplingParams, flavour: Flavour) -> dict[str, Any]:
    """What is asked of the sampling. What has parkd's default is left to the server, except `_ALWAYS`."""
    body: dict[str, Any] = {}
    known = {each.name for each in dataclass_fields(sampling)}
    for name in (*OPENAI_SAMPLING, *_EXTRA_SAMPLING):
        assert name in known
        value = getattr(sampling, name)
        there = _field_for(name, flavour)
        if there is None or (value == getattr(_DEFAULTS, name) and name not in _ALWAYS):
            continue
        if name == "logit_bias":
            value = {
                str(token_id): max(-100.0, bias) if bias != -math.inf else -100.0 for token_id, bias in value.items()
            }
        body[there] = value
    return body


def _form_fields(schema: Mapping[str, Any] | None, form: TextForm | None, flavour: Flavour) -> dict[str, Any]:
    if form is not None:
        outer, _, inner = flavour.forms[form.kind].partition(".")
        value: Any = list(form.source) if form.kind is FormKind.CHOICE else form.source
        return {outer: {inner: value} if inner else value}
    if schema is None:
        return {}
    if schema == {"type": "object"}:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def common_fields(
    sampling: SamplingParams,
    schema: Mapping[str, Any] | None,
    form: TextForm | None,
    flavour: Flavour,
    *,
    unit: Unit,
    model: str,
    salt: str,
) -> dict[str, Any]:
    """The fields that a chat and a completion have in common. `salt`: requests with others share no state with this
    one; empty: with all without one."""
    body: dict[str, Any] = {"stream_options": {"include_usage": True}}
    if flavour.counts_always and unit is Unit.CHARACTER:  # ids are counted here
        outer, _, inner = flavour.counts_always.partition(".")
        body[outer] = {**body.get(outer, {}), inner: True} if inner else True
    return {
        "model": model,
        "stream": True,
        **body,
        **sampling_fields(sampling, flavour),
        **_form_fields(schema, form, flavour),
        **({"cache_salt": salt} if salt and flavour.salts else {}),
    }


def chat_fields(talk: Talk, request: TurnRequest | None, limit: int | None, flavour: Flavour) -> dict[str, Any]:
    """The fields that only a chat has."""
    body: dict[str, Any] = {"messages": talk.messages}
    if talk.begun and flavour.continues is Continues.BY_FIELDS:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif not talk.is_open:
        body["add_generation_prompt"] = False
    if limit is not None:
        body["max_tokens" if flavour.sampling is not None else "max_completion_tokens"] = max(limit, LEAST_OUTPUT)
    settings = dict(talk.settings)
    if settings and flavour.template_kwargs:
        body["chat_template_kwargs"] = settings
    effort = settings.get(EFFORT)
    if effort in EFFORTS and flavour.takes_effort:
        body[EFFORT] = effort
    if talk.tools:
        body["tools"] = talk.tools
        choice = _tool_choice(request)
        if choice is not None and flavour.forces_calls:
            body["tool_choice"] = choice
        if request is not None and not request.parallel_tool_calls and flavour.sampling is None:
            body["parallel_tool_calls"] = False
    return body


def _tool_choice(request: TurnRequest | None) -> Any:
    mode = ToolChoiceMode.AUTO if request is None else request.tool_choice.mode
    if request is not None and mode is ToolChoiceMode.NAMED:
        return {"type": "function", "function": {"name": request.tool_choice.name}}
    return mode.value
