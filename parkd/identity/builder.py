"""A request to its identity: render, tokenise, hash. The only part of this folder that holds state.

TurnRequest --normalise, canonical, render--> text --tokenise--> ids --images--> units --chain--> hashes
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from parkd.engine_adapter.base import ChatTemplate, Tokenizer
from parkd.identity.chain import ChainMemo
from parkd.identity.normalise import Normaliser, NormaliserConfig
from parkd.identity.units import units_of
from parkd.types import ConversationKey, PromptIdentity, TurnRequest


@dataclass(frozen=True, slots=True)
class BuildTimings:
    """Seconds of one build, by part."""

    render_s: float = 0.0
    """Normalising, canonical form and the chat template."""
    tokenise_s: float = 0.0
    hash_s: float = 0.0
    """Units, prefix hashes, boundaries and segments."""

    @property
    def total_s(self) -> float:
        return self.render_s + self.tokenise_s + self.hash_s


class IdentityBuilder:
    """Thread-safe; meant to run in worker threads, since tokenising a new long text takes its time.

    `memo_bytes` bounds all that is remembered between requests; 0 remembers nothing.
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
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._fingerprint = fingerprint
        self._normaliser = Normaliser(normaliser or NormaliserConfig())
        self._chains = ChainMemo(block_tokens, memo_bytes // 4)

    def build(self, request: TurnRequest, *, steering: bytes = b"") -> PromptIdentity:
        """Raises InvalidRequest when the template refuses the messages or nothing is left to read."""
        return self.build_timed(request, steering=steering)[0]

    def build_timed(self, request: TurnRequest, *, steering: bytes = b"") -> tuple[PromptIdentity, BuildTimings]:
        """`build`, and how long its parts took."""
        began_s = time.perf_counter()
        text = self.render(request)
        rendered_s = time.perf_counter()
        token_ids = np.asarray(self._tokenizer.encode(text), dtype=np.int64)
        tokenised_s = time.perf_counter()
        key = ConversationKey(request.namespace, self._fingerprint, steering)
        units = units_of(token_ids.copy())
        hashes = self._chains.hashes(units, key.digest)
        identity = PromptIdentity(key=key, token_ids=token_ids, units=units, prefix_hashes=hashes)
        hashed_s = time.perf_counter()
        timings = BuildTimings(rendered_s - began_s, tokenised_s - rendered_s, hashed_s - tokenised_s)
        return identity, timings

    def render(self, request: TurnRequest) -> str:
        """The text the model will read."""
        if request.prompt is not None:
            return request.prompt
        messages = self._normaliser.apply(request.messages)
        return self._template.render(messages, request.tools, request.template_kwargs)
