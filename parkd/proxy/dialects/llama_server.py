"""llama-server's own endpoints for raw text: `POST /completion` and `POST /infill`.

    data: {"content": "The", "stop": false} ...   data: {"content": "", "stop": true, "stop_type": "eos", ...}

Both are translated to legacy completions, whose checks then serve them too. Without `n_predict` an answer has no limit
of its own. A stream has no `[DONE]`.

Source: the README of llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parkd.errors import InvalidRequest, ParkdError
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.base import ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.frames import comment, json_frame
from parkd.proxy.dialects.nested import objects, text_at
from parkd.proxy.dialects.openai_chat import so_far, timings_of
from parkd.proxy.dialects.openai_completions import OpenAICompletions, infilled
from parkd.proxy.dialects.openai_errors import error_answer, error_object
from parkd.types import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Infill,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TurnRequest,
)

REFUSED = {
    "n_probs": "POST /v1/completions gives them (`logprobs`).",
    "return_tokens": "POST /tokenize turns the answer's text into ids.",
}
_STOP_TYPES = {FinishReason.LENGTH: "limit", FinishReason.CONTENT_FILTER: "none"}


class LlamaCompletion(TurnDialect):
    """`POST /completion`."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        for name, advice in REFUSED.items():
            if body.get(name) not in (None, False, 0):
                raise InvalidRequest(f"`{name}` is not supported here: {advice}", param=name)
        fields.only_one(body, "n")
        own = ("n_predict", "max_tokens", "logprobs", "suffix")
        common = {name: value for name, value in body.items() if name not in own}
        limit = fields.limit(body, "n_predict")
        return OpenAICompletions().parse({**common, "max_tokens": -1 if limit is None else limit}, headers)

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> LlamaEncoder:  # noqa: ARG002
        return LlamaEncoder(meta, include_progress=fields.flag(body, "return_progress", default=False))

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:  # noqa: ARG002 - it is a header
        return error_answer(error)


class LlamaInfill(LlamaCompletion):
    """`POST /infill`."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        for name in ("input_prefix", "input_suffix"):
            if not isinstance(body.get(name), str):
                raise InvalidRequest(f"`{name}` must be a string.", param=name)
        infill = Infill(
            prefix=body["input_prefix"],
            suffix=body["input_suffix"],
            files=tuple(
                (text_at(file, "filename", f"input_extra[{place}]"), text_at(file, "text", f"input_extra[{place}]"))
                for place, file in enumerate(objects(body.get("input_extra"), "input_extra"))
            ),
            begun=fields.text(body, "prompt"),
            param="input_suffix",
        )
        return infilled(super().parse({**body, "prompt": ""}, headers), infill)


class LlamaEncoder:
    """Implements `Encoder`."""

    def __init__(self, meta: ResponseMeta, *, include_progress: bool) -> None:
        self._head = {"index": 0, "id_slot": 0, "model": meta.model}
        self._include_progress = include_progress
        self._text: list[str] = []
        self._report: CacheReport | None = None
        self._finished: Finished | None = None

    def feed(self, event: Event) -> Iterable[bytes]:
        match event:
            case Started(report):
                self._report = report
            case TextDelta(text, timings=timings) | ReasoningDelta(text, timings=timings):
                self._text.append(text)
                return [self._frame(text, **so_far(self._report, timings))]
            case Progress() if self._include_progress:
                return [self._frame("", prompt_progress=event.shown)]
            case Finished():
                self._finished = event
                return [json_frame(self._last(event, ""))]
        return []

    def keep_alive(self) -> bytes:
        return comment()

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        return [json_frame({"error": error_object(error)})]

    def document(self) -> Mapping[str, Any]:
        assert self._finished is not None, "the turn has not finished"
        return self._last(self._finished, "".join(self._text))

    def _frame(self, text: str, **more: Any) -> bytes:
        return json_frame({**self._head, "content": text, "tokens": [], "stop": False, **more})

    def _last(self, finished: Finished, text: str) -> Mapping[str, Any]:
        kind = "word" if finished.stop_string is not None else _STOP_TYPES.get(finished.reason, "eos")
        return {
            **self._head,
            "content": text,
            "tokens": [],
            "stop": True,
            "stop_type": kind,
            "stopping_word": finished.stop_string or "",
            "tokens_predicted": finished.timings.output_tokens,
            "tokens_evaluated": finished.report.prompt_tokens,
            "tokens_cached": finished.report.reused_tokens,
            "truncated": False,
            "timings": timings_of(finished.report, finished.timings),
        }
