"""From a request to its identity: render, tokenise, hash.

TurnRequest --normalise, canonical, render--> text --tokenise--> ids --images--> units --chain--> hashes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from parkd.engine_adapter.base import ChatTemplate, ImageReader, Tokenizer
from parkd.errors import InvalidRequest
from parkd.identity.chain import ChainMemo
from parkd.identity.images import ImageMemo, PromptImages, RememberingReader, take_out
from parkd.identity.lengths import check_length, check_messages
from parkd.identity.normalise import Normaliser, NormaliserConfig
from parkd.identity.output_memory import GENERATION, OutputMemory, Said
from parkd.identity.render import Renderer
from parkd.identity.segments import OpenerMarks, locate, map_prompt
from parkd.identity.splice import Splicer, Trails
from parkd.identity.tokens import SegmentTokenizer, TextMemo
from parkd.identity.units import units_of
from parkd.identity.watched import WatchedTemplate
from parkd.namespaces import ByNamespace
from parkd.types import ConversationKey, PromptIdentity, StillWanted, TurnRequest, always_wanted


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


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of the requests of one namespace of keys."""

    texts: TextMemo
    chains: ChainMemo
    template: ChatTemplate
    images: ImageMemo = field(default_factory=ImageMemo)
    trails: Trails = field(default_factory=Trails)


class IdentityBuilder:
    """Builds identities. Thread-safe; called in worker threads, since tokenising a long new text takes a while.

    `memo_bytes` limits what is cached of texts between requests, in equal parts for each of `namespaces` of keys; 0
    disables caching.
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
        namespaces: int = 1,
        template_within: Callable[[str], ChatTemplate] | None = None,
    ) -> None:
        """`template_within` gives the template with which a namespace is rendered, if it remembers what it rendered.
        `answers` are spliced into the prompts that repeat them; None renders everything. Without `images`, requests
        with images are refused. With `context_tokens`, texts with far more tokens are refused without tokenising all of
        them."""
        self._context_tokens = context_tokens
        self._images = images
        self._fingerprint = fingerprint
        self._text = tokenizer
        self._splicer = None if answers is None else Splicer(answers)
        placeholder = "" if images is None else images.tokens.placeholder
        self.renderer = Renderer(template, Normaliser(normaliser or NormaliserConfig()), tokenizer, placeholder)
        self._stand_ins = self.renderer.stand_ins
        self._tokenizer = SegmentTokenizer(tokenizer, 0, OpenerMarks(self.renderer.profile), self._stand_ins)
        share_bytes = memo_bytes // namespaces
        self._memories = ByNamespace(
            lambda namespace: Memory(
                TextMemo(share_bytes - share_bytes // 4),
                ChainMemo(block_tokens, share_bytes // 4),
                template if template_within is None else template_within(namespace),
            ),
            most=namespaces,
        )
        self.images_limit_bytes = namespaces * ImageMemo.LIMIT_BYTES

    @property
    def memo_bytes(self) -> int:
        """Bytes of texts, tokens and hashes remembered now."""
        return sum(memory.chains.memo_bytes + memory.texts.bytes for memory in self._memories.all())

    @property
    def reads_images(self) -> bool:
        return self._images is not None

    @property
    def images_bytes(self) -> int:
        """Bytes of facts about images remembered now; at most `images_limit_bytes`."""
        return sum(memory.images.memory_bytes for memory in self._memories.all())

    @property
    def by_segment(self) -> bool:
        """False if this tokenizer's texts can only be tokenised whole."""
        return self._tokenizer.by_segment

    def build(
        self, request: TurnRequest, *, steering: bytes = b"", still_wanted: StillWanted = always_wanted
    ) -> PromptIdentity:
        """The identity of the request's prompt. Raises InvalidRequest if the template refuses the messages or the
        prompt is empty, ContextOverflow for a text that is far too long, and what `still_wanted` raises."""
        return self.build_timed(request, steering=steering, still_wanted=still_wanted)[0]

    def build_timed(
        self, request: TurnRequest, *, steering: bytes = b"", still_wanted: StillWanted = always_wanted
    ) -> tuple[PromptIdentity, BuildTimings]:
        """As `build`, and how long each phase took."""
        began_s = time.perf_counter()
        if self._context_tokens is not None:
            check_messages(len(request.messages), self._context_tokens)
        memory = self._memories.of(request.namespace)
        tokenizer = self._tokenizer.within(memory.texts, request.namespace, still_wanted)
        messages, pictures = take_out(request.messages)
        reader = self._reader(memory, request.namespace)
        images = PromptImages(pictures, reader, self._context_tokens, still_wanted)
        shown = replace(request, messages=messages) if pictures else request
        prompt = self.renderer.over(WatchedTemplate(memory.template, still_wanted)).render(shown)
        prompt = replace(prompt, text=images.wrapped(prompt.text))
        plain = self._stand_ins.undo(prompt.text)
        if self._context_tokens is not None:
            check_length(self._text, plain, self._context_tokens, still_wanted)
        rendered_s = time.perf_counter()
        remembered, base = tokenizer.tokenised_on(prompt.text)
        tokenised = images.expanded(remembered)
        if not len(tokenised.ids):
            raise InvalidRequest("The prompt is empty. Send some text.", param="messages")
        key = ConversationKey(request.namespace, self._fingerprint, steering)
        located = locate(prompt, tokenised, plain)
        if self._splicer is not None:
            turns, starts = prompt.turns, located.starts
            tokenised = self._splicer.splice(
                memory.trails, turns, starts, tokenised, plain, key.digest, remembered, base
            )
        tokenised_s = time.perf_counter()
        spans = images.spans(tokenised)
        units = units_of(tokenised.ids, spans)
        prompt_map = map_prompt(prompt, tokenised, plain, tokenizer, self.renderer.profile, located)
        identity = PromptIdentity(
            key=key,
            token_ids=tokenised.ids.copy(),  # the caller may change its copy; the cached array must not change
            units=units,
            prefix_hashes=memory.chains.hashes(units, key.digest),
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
        namespace = prompt.key.namespace
        tokenizer = self._tokenizer.within(self._memories.of(namespace).texts, namespace)
        opener = self._text.decode(prompt.token_ids[last.start :].tolist())
        tokenizer.expect(opener + self._stand_ins.written(self._text.decode(list(answer_ids))))
        if said.reasoning:
            answer = self._stand_ins.put("".join(said.runs).strip())
            tokenizer.expect(self.renderer.profile.openers.get("assistant", opener) + answer)

    def render(self, request: TurnRequest) -> str:
        """The text that the model reads, with one placeholder for each image. Raises as `build` does."""
        memory = self._memories.of(request.namespace)
        messages, pictures = take_out(request.messages)
        reader = self._reader(memory, request.namespace)
        PromptImages(pictures, reader, self._context_tokens)  # raises for images that a turn would refuse
        shown = replace(request, messages=messages) if pictures else request
        prompt = self.renderer.over(WatchedTemplate(memory.template, always_wanted)).render(shown)
        if prompt.proof is not None:
            prompt.proof()
        return self._stand_ins.undo(prompt.text)

    def _reader(self, memory: Memory, namespace: str) -> ImageReader | None:
        return None if self._images is None else RememberingReader(self._images, memory.images, namespace)
