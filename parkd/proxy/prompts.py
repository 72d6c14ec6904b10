"""Builds the prompts of parsed requests in worker threads, and refuses those that cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from parkd.errors import ContextOverflow, InvalidRequest
from parkd.identity.lengths import check_length
from parkd.lane.turn import prompt_tail
from parkd.proxy.config import Services
from parkd.proxy.dialects import fields
from parkd.types import PromptIdentity, StillWanted, TokenMask, TurnRequest, always_wanted

BUILD_THREADS = 2
"""Prompts that are rendered and tokenised at the same time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a turn needs before it queues."""

    prompt: PromptIdentity
    mask: TokenMask | None
    """For its answer."""
    tail: str
    """The end of the rendered prompt."""
    request: TurnRequest
    """The request, with ids for the texts in it that mean tokens."""


class Prompts:
    """Builds prompts. Must be created and used on the event loop."""

    def __init__(self, services: Services, owners: int = 1) -> None:
        """If there are several `owners`, one of them has at most half of the threads."""
        self._services = services
        self._limiter = anyio.CapacityLimiter(BUILD_THREADS)
        self._share = BUILD_THREADS if owners <= 1 else max(1, BUILD_THREADS // 2)
        self._limiter_of: dict[str, anyio.CapacityLimiter] = {}
        """By owner, of which there are as many as keys."""

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Runs `work`, which may take long, in a worker thread, as soon as one is free for this owner."""
        if owner not in self._limiter_of:
            self._limiter_of[owner] = anyio.CapacityLimiter(self._share)
        async with self._limiter_of[owner]:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    async def build(self, request: TurnRequest, owner: str, still_wanted: StillWanted = always_wanted) -> Prepared:
        """Raises what `still_wanted` raises, InvalidRequest, and ContextOverflow for a prompt
        that is far too long; `check_fits` finds those that are slightly too long."""
        has_form = request.response_schema is not None or request.response_form is not None
        if has_form and self._services.build_mask is None:
            advice = "This server gives free text only. Leave out `response_format` and ask for JSON in the messages."
            raise InvalidRequest(advice, param="response_format")
        return await self.run(owner, partial(self._build, request, still_wanted))

    async def tokenise(self, text: str, owner: str, *, special: bool = True) -> list[int]:
        """The ids of a plain text; without `special`, control tokens in it are letters. Raises ContextOverflow for a
        text that is far too long for any prompt."""
        return await self.run(owner, partial(self._tokenise, text, special))

    def _tokenise(self, text: str, special: bool) -> list[int]:
        engine = self._services.engine
        tokenizer = engine.tokenizer
        if engine.info.most_units is not None:
            check_length(tokenizer, text, engine.info.most_units)
        if special:
            return tokenizer.encode(text)
        return tokenizer.encode_parts([text], frozenset(tokenizer.control_tokens))

    def _build(self, request: TurnRequest, still_wanted: StillWanted) -> Prepared:
        services = self._services
        if request.infill is not None:
            opening = services.engine.text_of(services.engine.opening_ids)
            request = replace(request, infill=replace(request.infill, opening=opening))
        request = self._with_biased_ids(request)
        steering = services.engine.steering_digest(request.steering, request.adapters)
        prompt = services.build_identity(request, steering=steering, still_wanted=still_wanted)
        tail = prompt_tail(services.engine, prompt)
        mask = services.build_mask(request, tail, still_wanted) if services.build_mask else None
        return Prepared(prompt, mask, tail, request)

    def _with_biased_ids(self, request: TurnRequest) -> TurnRequest:
        sampling = request.sampling
        if not sampling.text_bias:
            return request
        of_texts = {
            token_id: bias for text, bias in sampling.text_bias for token_id in self._tokenise(text, special=False)
        }
        biases = {**of_texts, **sampling.logit_bias}
        return replace(request, sampling=replace(sampling, logit_bias=biases, text_bias=()))

    def check_fits(self, prompt_tokens: int, request: TurnRequest) -> None:
        """Raises InvalidRequest for an empty prompt, and ContextOverflow unless the prompt and one token of output fit.
        A longer output ends with `length` at the end of the context."""
        asked = request.max_output_tokens
        info = self._services.engine.info
        context_tokens = info.most_units
        fields.check_least(request.sampling, asked)
        if prompt_tokens == 0:
            raise InvalidRequest("The prompt is empty. Send at least one message.", param="messages")
        if context_tokens is not None and prompt_tokens + (0 if asked == 0 else 1) > context_tokens:
            raise ContextOverflow(prompt_tokens, 1 if asked is None else asked, context_tokens, info.model_tokens)
