"""From a request to its identity: render, tokenise, hash.

TurnRequest --normalise, canonical, render--> text --tokenise--> ids --images--> units --chain--> hashes
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parkd.engine_adapter.base import ChatTemplate, ImageReader, Tokenizer
from parkd.errors import InvalidRequest
from parkd.identity.chain import ChainMemo
from parkd.identity.images import PromptImages, take_out
from parkd.identity.lengths import check_length, check_messages
from parkd.identity.normalise import Normaliser, NormaliserConfig
from parkd.identity.output_memory import GENERATION, OutputMemory, Said
from parkd.identity.render import Renderer
from parkd.identity.segments import OpenerMarks, locate, map_prompt
from parkd.identity.splice import Splicer
from parkd.identity.tokens import SegmentTokenizer
from parkd.identity.units import units_of
from parkd.types import ConversationKey, PromptIdentity, TurnRequest


@dataclass(frozen=True, slots=True)
class BuildTimings:
    """Seconds of one build, by phase."""

    render_s: float = 0.0
    """Decoding images, normalising, canonical form and the chat template."""
    tokenise_s: float = 0.0
    hash_s: float = 0.0
    """Units, prefix hashes, boundaries and segments."""

    @property
    def total_s(self) -> float:
        return self.render_s + self.tokenise_s + self.hash_s


class IdentityBuilder:
    """Builds identities. Thread-safe; called in worker threads, since tokenising a long new text takes a while.

    `memo_bytes` limits what is cached between requests; 0 disables caching.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        fingerprint: bytes,
        block_tokens: int,
        memo_bytes: int,
        *,
        normaliser: NormaliserConfig | None = None,
        answers: OutputMemory | None = None,
        images: ImageReader | None = None,
        context_tokens: int | None = None,
    ) -> None:
        """`answers` are spliced into the prompts that repeat them; None renders everything. Without `images`, requests
        with images are refused. With `context_tokens`, texts with far more tokens are refused without tokenising all of
        them."""
        self._context_tokens = context_tokens
        self._images = images
        self._fingerprint = fingerprint
        self._text = tokenizer
        self._splicer = None if answers is None else Splicer(answers)
        placeholder = "" if images is None else images.tokens.placeholder
        self._renderer = Renderer(template, Normaliser(normaliser or NormaliserConfig()), tokenizer, placeholder)
        self._stand_ins = self._renderer.stand_ins
        self._chains = ChainMemo(block_tokens, memo_bytes // 4)
        self._tokenizer = SegmentTokenizer(
            tokenizer, memo_bytes - memo_bytes // 4, OpenerMarks(self._renderer.profile), self._stand_ins
        )

    @property
    def memo_bytes(self) -> int:
        """Bytes remembered now."""
        return self._chains.memo_bytes + self._tokenizer.memo_bytes

    @property
    def by_segment(self) -> bool:
        """False if this tokenizer's texts can only be tokenised whole."""
        return self._tokenizer.by_segment

    def build(self, request: TurnRequest, *, steering: bytes = b"") -> PromptIdentity:
        """The identity of the request's prompt. Raises InvalidRequest if the template refuses the messages or the
        prompt is empty, and ContextOverflow for a text that is far too long."""
        return self.build_timed(request, steering=steering)[0]

    def build_timed(self, request: TurnRequest, *, steering: bytes = b"") -> tuple[PromptIdentity, BuildTimings]:
        """As `build`, and how long each phase took."""
        began_s = time.perf_counter()
        if self._context_tokens is not None:
            check_messages(len(request.messages), self._context_tokens)
        messages, pictures = take_out(request.messages)
        images = PromptImages(pictures, self._images, self._context_tokens)
        prompt = self._renderer.render(replace(request, messages=messages) if pictures else request)
        prompt = replace(prompt, text=images.wrapped(prompt.text))
        plain = self._stand_ins.undo(prompt.text)
        if self._context_tokens is not None:
            check_length(self._text, plain, self._context_tokens)
        rendered_s = time.perf_counter()
        tokenised = images.expanded(self._tokenizer.tokenise(prompt.text))
        if not len(tokenised.ids):
            raise InvalidRequest("The prompt is empty. Send some text.", param="messages")
        key = ConversationKey(request.namespace, self._fingerprint, steering)
        located = locate(prompt, tokenised, plain)
        if self._splicer is not None:
            tokenised = self._splicer.splice(prompt.turns, located.starts, tokenised, plain, key.digest)
        tokenised_s = time.perf_counter()
        spans = images.spans(tokenised)
        units = units_of(tokenised.ids, spans)
        prompt_map = map_prompt(prompt, tokenised, plain, self._tokenizer, self._renderer.profile, located)
        identity = PromptIdentity(
            key=key,
            token_ids=tokenised.ids.copy(),  # the caller may change its copy; the cached array must not change
            units=units,
            prefix_hashes=self._chains.hashes(units, key.digest),
            segments=prompt_map.segments,
            images=spans,
            boundaries=prompt_map.boundaries,
            generation_stays=prompt_map.generation_stays,
            template_tokens=prompt_map.template_tokens,
            rewrites=prompt.rewrites,
            proof=prompt.proof,
        )
        hashed_s = time.perf_counter()
        return identity, BuildTimings(rendered_s - began_s, tokenised_s - rendered_s, hashed_s - tokenised_s)

    def expect(self, prompt: PromptIdentity, answer_ids: Sequence[int], said: Said) -> None:
        """Tokenises an answer ahead, in the forms in which the next prompt is likely to contain it: as it was written,
        and without the thinking that most templates drop. Meant to run in the background."""
        last = prompt.segments[-1] if prompt.segments else None
        if last is None or last.label != GENERATION:
            return
        opener = self._text.decode(prompt.token_ids[last.start :].tolist())
        self._tokenizer.expect(opener + self._stand_ins.written(self._text.decode(list(answer_ids))))
        if said.reasoning:
            answer = self._stand_ins.put("".join(said.runs).strip())
            self._tokenizer.expect(self._renderer.profile.openers.get("assistant", opener) + answer)

    def render(self, request: TurnRequest) -> str:
        """The text that the model reads, with one placeholder for each image. Raises as `build` does."""
        messages, pictures = take_out(request.messages)
        PromptImages(pictures, self._images, self._context_tokens)  # raises for images that a turn would refuse
        prompt = self._renderer.render(replace(request, messages=messages) if pictures else request)
        if prompt.proof is not None:
            prompt.proof()
        return self._stand_ins.undo(prompt.text)
