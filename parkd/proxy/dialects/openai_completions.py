"""OpenAI's legacy completions: raw text in, raw text out, no template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parkd.errors import InvalidRequest, ParkdError
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.base import Encoder, ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.choices import Choices
from parkd.proxy.dialects.frames import DONE, comment, json_frame
from parkd.proxy.dialects.logprobs import LegacyLogprobs
from parkd.proxy.dialects.nested import asked_form, cache_hints
from parkd.proxy.dialects.openai_chat import so_far, timings_of, usage_of
from parkd.proxy.dialects.openai_errors import error_answer, error_object
from parkd.types import (
    CacheReport,
    Event,
    Finished,
    Infill,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    TurnRequest,
)

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API."""

INFILL_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|cursor|>")
"""With these tokens models end what they fill in. Many files call them ordinary ones, whose text is then shown."""

REFUSED = {
    "echo": "the answer holds generated text only. Put the prompt before it yourself.",
}


class OpenAICompletions(TurnDialect):
    """`POST /v1/completions`."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        for name, advice in REFUSED.items():
            if body.get(name) not in (None, False, "", 0):
                raise InvalidRequest(f"`{name}` is not supported: {advice}", param=name)
        form = asked_form(body, fields.obj(body, "response_format"), "response_format")
        fields.only_one(body, "best_of")
        fields.flag(fields.obj(body, "stream_options"), "include_usage", default=False)
        named = "n_predict" if body.get("max_tokens") is None else "max_tokens"
        limit = fields.limit(body, named)
        request = TurnRequest(
            prompt=_prompt(body),
            sampling=replace(
                fields.sampling(body), top_logprobs=fields.whole(body, "logprobs", 0, fields.MAX_TOP_LOGPROBS)
            ),
            stop=fields.stop_strings(body, "stop"),
            max_output_tokens=DEFAULT_MAX_TOKENS if body.get(named) is None else limit,
            answers=fields.answers(body),
            stream=fields.flag(body, "stream", default=False),
            model=fields.text(body, "model"),
            response_schema=form[0],
            response_form=form[1],
            cache=cache_hints(body, headers),
            steering=fields.steering(body),
            adapters=fields.adapters(body),
            timings_per_token=fields.flag(body, "timings_per_token", default=False),
        )
        suffix = fields.text(body, "suffix")
        return infilled(request, Infill(request.prompt or "", suffix)) if suffix else request

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder:
        include_usage = fields.flag(fields.obj(body, "stream_options"), "include_usage", default=False)
        include_progress = fields.flag(body, "return_progress", default=False)
        encoders = [
            CompletionsEncoder(
                meta,
                index=index,
                include_usage=include_usage,
                include_progress=include_progress,
                include_logprobs=request.sampling.top_logprobs is not None,
            )
            for index in range(request.answers)
        ]
        return encoders[0] if len(encoders) == 1 else Choices(encoders)

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:  # noqa: ARG002 - it is a header
        return error_answer(error)


def infilled(request: TurnRequest, infill: Infill) -> TurnRequest:
    """The request with this gap to fill in place of its prompt."""
    return replace(request, prompt="", infill=infill, stop=(*request.stop, *INFILL_ENDS))


class CompletionsEncoder:
    """Implements `Encoder`."""

    def __init__(
        self, meta: ResponseMeta, *, index: int, include_usage: bool, include_progress: bool, include_logprobs: bool
    ) -> None:
        """`index` is the choice's."""
        self._index = index
        self._head = {
            "id": "cmpl-" + meta.request_id.removeprefix("req_"),
            "object": "text_completion",
            "created": meta.created_s,
            "model": meta.model,
        }
        self._include_usage = include_usage
        self._include_progress = include_progress
        self._legacy = LegacyLogprobs() if include_logprobs else None
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._report: CacheReport | None = None
        self._finished: Finished | None = None

    def feed(self, event: Event) -> Iterable[bytes]:
        match event:
            case Started(report):
                self._report = report
            case TextDelta(text, logprobs, timings):
                self._text.append(text)
                self._logprobs += logprobs
                scores = self._legacy.of(logprobs) if self._legacy is not None else None
                return [self._chunk(text, None, so_far(self._report, timings), scores)]
            case ReasoningDelta(text, timings):
                # Without a template there is no thinking: what was parsed as such is ordinary text.
                self._text.append(text)
                return [self._chunk(text, None, so_far(self._report, timings))]
            case Progress() if self._include_progress:
                return [self._chunk("", None, {"prompt_progress": event.shown})]
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
        assert finished is not None, "the turn has not finished"
        scores = LegacyLogprobs().of(self._logprobs) if self._legacy is not None else None
        return {
            **self._head,
            "choices": [self._choice("".join(self._text), finished, scores)],
            **self.totals(finished),
        }

    def choice_end(self, finished: Finished) -> bytes:
        return self._chunk("", finished, {"timings": timings_of(finished.report, finished.timings)})

    def stream_end(self, finished: Finished) -> Iterable[bytes]:
        if self._include_usage:
            yield json_frame({**self._head, "choices": [], **self.totals(finished)})
        yield DONE

    def totals(self, finished: Finished) -> Mapping[str, Any]:
        return {"usage": usage_of(finished), "timings": timings_of(finished.report, finished.timings)}

    def _chunk(
        self,
        text: str,
        finished: Finished | None,
        extra: Mapping[str, Any] | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        return json_frame({**self._head, "choices": [self._choice(text, finished, logprobs)], **(extra or {})})

    def _choice(self, text: str, finished: Finished | None, logprobs: Mapping[str, Any] | None) -> Mapping[str, Any]:
        reason = None
        if finished is not None:
            reason = finished.reason.value if finished.reason.is_cut else "stop"
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise InvalidRequest(
            "`prompt` must be one string. Send several prompts as several requests, and text instead of token ids.",
            param="prompt",
        )
    return prompt
