"""OpenAI chat completions, in the form that the SDK and clients built on it expect.

    chunk role | chunk delta ... | chunk finish_reason, timings | [chunk usage, choices []] | [DONE]

`prompt_tokens` includes cached tokens; a token is cached if it was not computed in this request. Answers also have
llama.cpp's `timings`, with fields of parkd's own. Unknown fields of a request are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from parkd.errors import InvalidRequest, ParkdError
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.base import Encoder, ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.choices import Choices
from parkd.proxy.dialects.frames import DONE, comment, json_frame
from parkd.proxy.dialects.logprobs import chat_logprobs
from parkd.proxy.dialects.nested import (
    allowed_choice,
    asked_form,
    cache_hints,
    check_named,
    continues,
    image_part,
    name_at,
    object_at,
    objects,
    refuse_functions,
    strict_names,
    text_at,
    wrong,
)
from parkd.proxy.dialects.openai_errors import error_answer, error_object
from parkd.proxy.dialects.thinking import reasoning_of, template_words
from parkd.types import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
NEED_CONTENT = frozenset({"system", "developer", "user"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
QUIET_PARTS = frozenset({"refusal", "reasoning", "thinking"})
"""Parts of earlier answers that are passed to the template unchecked; it uses their text or ignores them."""


class OpenAIChat(TurnDialect):
    """`POST /v1/chat/completions`."""

    def __init__(self, system_fingerprint: str = "parkd") -> None:
        self._system_fingerprint = system_fingerprint

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """Raises InvalidRequest."""
        refuse_functions(body)
        if body.get("audio") is not None or "audio" in fields.items(body, "modalities"):
            name = "audio" if body.get("audio") is not None else "modalities"
            raise InvalidRequest(
                f"`{name}` asks for speech, and this server answers with text. Leave it out.", param=name
            )
        given = fields.items(body, "messages")
        if not given:
            raise wrong("messages", "a list with at least one message")
        messages = [_checked_message(message, f"messages[{index}]") for index, message in enumerate(given)]
        fields.flag(fields.obj(body, "stream_options"), "include_usage", default=False)
        tools = _tools(body)
        reasoning = reasoning_of(body, fields.text(body, "reasoning_effort") or None)
        choice = _tool_choice(body, tools)
        form = asked_form(body, fields.obj(body, "response_format"), "response_format")
        opens = fields.flag(body, "add_generation_prompt", default=True)
        may_continue = fields.flag(body, "continue_final_message", default=opens)
        if body.get("continue_final_message") and fields.flag(body, "add_generation_prompt", default=False):
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` contradict each other. Send one of them.",
                param="continue_final_message",
            )
        return TurnRequest(
            messages=messages,
            tools=tools,
            template_kwargs=template_words(body, reasoning),
            sampling=replace(
                fields.sampling(body),
                top_logprobs=fields.top_logprobs(body, asked=fields.flag(body, "logprobs", default=False)),
            ),
            stop=fields.stop_strings(body, "stop"),
            max_output_tokens=_max_output_tokens(body),
            answers=fields.answers(body),
            stream=fields.flag(body, "stream", default=False),
            model=fields.text(body, "model"),
            tool_choice=choice,
            strict_tools=strict_names((tool["function"]["name"], tool["function"]) for tool in tools),
            parallel_tool_calls=fields.flag(body, "parallel_tool_calls", default=True),
            response_schema=form[0],
            response_form=form[1],
            reasoning=reasoning,
            cache=cache_hints(body, headers),
            opens_answer=opens,
            continues=may_continue and continues(messages, choice, form),
            steering=fields.steering(body),
            adapters=fields.adapters(body),
            timings_per_token=fields.flag(body, "timings_per_token", default=False),
        )

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder:
        include_usage = request.stream and fields.flag(
            fields.obj(body, "stream_options"), "include_usage", default=False
        )
        encoders = [
            ChatEncoder(
                meta,
                self._system_fingerprint,
                index=index,
                include_usage=include_usage,
                include_progress=fields.flag(body, "return_progress", default=False),
                include_logprobs=request.sampling.top_logprobs is not None,
            )
            for index in range(request.answers)
        ]
        return encoders[0] if len(encoders) == 1 else Choices(encoders)

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:  # noqa: ARG002 - it is a header
        return error_answer(error)


class ChatEncoder:
    """Implements `Encoder`."""

    def __init__(
        self,
        meta: ResponseMeta,
        system_fingerprint: str,
        *,
        index: int,
        include_usage: bool,
        include_progress: bool,
        include_logprobs: bool,
    ) -> None:
        """`index` is the choice's."""
        self._index = index
        self._head = {
            "id": f"chatcmpl-{meta.request_id}",
            "created": meta.created_s,
            "model": meta.model,
            "system_fingerprint": system_fingerprint,
        }
        self._include_usage = include_usage
        self._include_progress = include_progress
        self._include_logprobs = include_logprobs
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._report: CacheReport | None = None
        self._finished: Finished | None = None

    def feed(self, event: Event) -> Iterable[bytes]:
        match event:
            case Started(report):
                self._report = report
                return [self._chunk({"role": "assistant", "content": ""})]
            case TextDelta(text, logprobs, timings):
                self._text.append(text)
                self._logprobs += logprobs
                return [self._chunk({"content": text}, None, so_far(self._report, timings), logprobs)]
            case ReasoningDelta(text, timings):
                self._reasoning.append(text)
                return [self._chunk({"reasoning_content": text}, None, so_far(self._report, timings))]
            case ToolCallDelta(timings=timings):
                return [self._chunk({"tool_calls": [self._call_delta(event)]}, None, so_far(self._report, timings))]
            case Progress() if self._include_progress:
                return [self._chunk({}, None, {"prompt_progress": event.shown})]
            case Finished():
                self._finished = event
                return [self.choice_end(event), *self.stream_end(event)]
        return []

    def keep_alive(self) -> bytes:
        return comment()

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        return [json_frame({"error": error_object(error)}), DONE]

    def document(self) -> Mapping[str, Any]:
        finished = self._finished
        assert finished is not None, "asked for the document before the answer ended"
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self._calls else None}
        message["refusal"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        logprobs = chat_logprobs(self._logprobs) if self._include_logprobs else None
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(finished),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            **self.totals(finished),
        }

    def choice_end(self, finished: Finished) -> bytes:
        return self._chunk({}, _finish_reason(finished), {"timings": timings_of(finished.report, finished.timings)})

    def stream_end(self, finished: Finished) -> Iterable[bytes]:
        if self._include_usage:
            told = {**self._head, "object": "chat.completion.chunk", "choices": [], **self.totals(finished)}
            yield json_frame(told)
        yield DONE

    def totals(self, finished: Finished) -> Mapping[str, Any]:
        return {"usage": usage_of(finished), "timings": timings_of(finished.report, finished.timings)}

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        extra: Mapping[str, Any] | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        scores = chat_logprobs(logprobs) if logprobs else None
        choice = {"index": self._index, "delta": delta, "logprobs": scores, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return json_frame(
            {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage, **(extra or {})}
        )

    def _call_delta(self, delta: ToolCallDelta) -> dict[str, Any]:
        """Adds the delta to the document's call, and returns it as clients expect it: each has the call's index."""
        call = self._calls.setdefault(
            delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        piece: dict[str, Any] = {"index": delta.index}
        function: dict[str, Any] = {"arguments": delta.arguments}
        if delta.call_id is not None:
            call["id"] = piece["id"] = delta.call_id
            piece["type"] = "function"
        if delta.name is not None:
            call["function"]["name"] = function["name"] = delta.name
        call["function"]["arguments"] += delta.arguments
        return {**piece, "function": function}


def usage_of(finished: Finished) -> Mapping[str, Any]:
    prompt_tokens, output_tokens = finished.report.prompt_tokens, finished.timings.output_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.report.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }


def so_far(report: CacheReport | None, timings: Timings | None) -> Mapping[str, Any]:
    """What a piece of an answer says of the time it took, if it was asked for."""
    return {} if report is None or timings is None else {"timings": timings_of(report, timings)}


def timings_of(report: CacheReport, timings: Timings) -> Mapping[str, Any]:
    """llama.cpp's fields first, then parkd's own. Times are in milliseconds."""
    drafts = timings.drafts
    guessed = {"draft_n": drafts.drafted, "draft_n_accepted": drafts.accepted} if drafts.drafted else {}
    paused = {"paused_ms": _ms(timings.paused_s), "pauses": timings.pauses} if timings.pauses else {}
    read_tokens = report.prompt_tokens - report.reused_tokens
    return {
        "cache_n": report.reused_tokens,
        "prompt_n": read_tokens,
        "prompt_ms": _ms(timings.prefill_s),
        **_pace("prompt", read_tokens, timings.prefill_s),
        "predicted_n": timings.output_tokens,
        "predicted_ms": _ms(timings.decode_s),
        # As in llama.cpp, the time of decoding begins at the first token, which belongs to the prompt's.
        **_pace("predicted", timings.output_tokens - 1, timings.decode_s),
        **guessed,
        "cache": report.outcome.value,
        "why": report.why,
        "wait_ms": _ms(timings.wait_s),
        "restore_ms": _ms(timings.restore_s),
        "ttft_ms": _ms(timings.first_token_s),
        **paused,
    }


def _pace(what: str, tokens: int, seconds: float) -> Mapping[str, float]:
    """Milliseconds a token and tokens a second; 0 where nothing was computed or measured."""
    known = tokens > 0 and seconds > 0
    return {
        f"{what}_per_token_ms": _ms(seconds / tokens) if known else 0.0,
        f"{what}_per_second": round(tokens / seconds, 3) if known else 0.0,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _finish_reason(finished: Finished) -> str:
    return "stop" if finished.reason is FinishReason.CANCELLED else finished.reason.value


def _checked_message(message: Any, where: str) -> Mapping[str, Any]:
    """The message with its images in the form that turns use. Raises InvalidRequest."""
    if not isinstance(message, dict):
        raise wrong(where, "an object with `role` and `content`")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(sorted(ROLES))}")
    if isinstance(content, list):
        parts = [_checked_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        message = {**message, "content": parts}
    elif not isinstance(content, str) and (content is not None or role in NEED_CONTENT):
        raise wrong(f"{where}.content", "a string or a list of parts")
    objects(message.get("tool_calls"), f"{where}.tool_calls")
    return cast(Mapping[str, Any], message)


def _checked_part(part: Any, where: str) -> Any:
    kind = text_at(part, "type", where) if isinstance(part, dict) else ""
    if isinstance(part, str) or kind in QUIET_PARTS:
        return part
    if kind in IMAGE_PARTS:
        return image_part(part, where)
    if kind not in TEXT_PARTS:
        raise wrong(where, "a part of type `text`")
    if not isinstance(part.get("text"), str):
        raise wrong(f"{where}.text", "a string")
    return part


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The function tools. Tools that only the vendor's servers can run are skipped."""
    functions = [tool for tool in objects(body.get("tools"), "tools") if tool.get("type", "function") == "function"]
    for index, tool in enumerate(functions):
        path = f"tools[{index}].function"
        function = object_at(tool, "function", f"tools[{index}]")
        name_at(function, "name", path)
        object_at(function, "parameters", path)
    return tuple(functions)


def _tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    choice = body.get("tool_choice")
    if choice is None:
        return ToolChoice()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return allowed_choice(choice, tools)
    if isinstance(choice, str) and choice in {"auto", "none", "required"}:
        return ToolChoice(ToolChoiceMode(choice))
    if not isinstance(choice, dict):
        raise wrong("tool_choice", "`auto`, `none`, `required` or an object that names a function")
    name = name_at(object_at(choice, "function", "tool_choice"), "name", "tool_choice.function")
    check_named(name, tools, "tool_choice")
    return ToolChoice(ToolChoiceMode.NAMED, name)


def _max_output_tokens(body: Mapping[str, Any]) -> int | None:
    """`max_completion_tokens`, its older name, or llama-server's. 0: read the prompt and generate nothing."""
    names = ("max_completion_tokens", "max_tokens", "n_predict")
    limits = [fields.limit(body, name) for name in names]
    return next((limit for limit in limits if limit is not None), None)
