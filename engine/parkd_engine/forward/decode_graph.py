"""Decoding as one CUDA graph for each stage.

    token, position -> | graph of stage 0 | -> hidden -> | graph of stage 1 | -> logits
                           writes row `position`            writes row `position`

A graph is recorded once and replayed for every step: addresses are fixed, and the position is read from device memory.
A step is one token. With a draft head there are also graphs for a token and its guesses, and the last stage's graphs
bring the head's rows up to date (`draft.graph`).
For the models of `forward.dense`, a layer takes seven kernels (`kernels`) instead of several dozen. For other
models, transformers' own forward pass is recorded: rows are written and read at positions in device memory
(`arenas.placed`), and known modules run in fewer kernels (`forward.one_token`). Rounding differs from the unrecorded
forward pass in the last bits. Parking copies the state that a token's own path computed, so it stays exact.

A forward pass that cannot be recorded, such as one that reads a value back from the device, runs unrecorded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.placed import TokenPlace
from parkd_engine.draft.graph import RecordedGuessing, RecordedReading
from parkd_engine.draft.head import DraftHead
from parkd_engine.forward.dense import dense_layers
from parkd_engine.forward.graphs import GraphPools, recorded
from parkd_engine.forward.handoff import HandOff
from parkd_engine.forward.one_token import few_kernels
from parkd_engine.forward.stages import Stage

log = logging.getLogger("parkd.engine")

Progress = Callable[[str, float], None]


class Decoder(ABC):
    """One stage's forward pass of a step's tokens, over buffers at fixed addresses."""

    def __init__(self, stage: Stage, hidden_size: int, tokens: int = 1) -> None:
        device = stage.device
        self.stage = stage
        self.tokens = torch.zeros((1, tokens), dtype=torch.int64, device=device)
        """Token ids `[1, tokens]`, read by the first stage."""
        self.hidden = torch.zeros((tokens, hidden_size), dtype=stage.dtype, device=device)
        """The stage's input (except the first stage's) and output, `[tokens, hidden]`."""
        self.logits = None
        """float32 `[tokens, vocab]`; last stage only."""
        if stage.head is not None:
            head: Any = stage.head
            self.logits = torch.empty((tokens, head.out_features), dtype=torch.float32, device=device)
        self._graph: Any = None

    def record(self, pool: Any = None) -> None:
        """Compiles the kernels and records the graph. Overwrites the first rows, so the timeline must be empty. `pool`
        is as for `graphs.recorded`."""
        self._graph = recorded(self.run, self.stage.device, pool)

    def replay(self) -> None:
        self._graph.replay()

    @abstractmethod
    def ready(self, token_ids: Sequence[int], position: int, turn: int) -> None:
        """Prepares a replay for tokens from `position` on; the first has the rotary position `turn`. Only queues
        work."""

    @abstractmethod
    def run(self) -> None:
        """Queues the kernels of the step."""

    def _take(self, token_ids: Sequence[int]) -> None:
        if self.stage.index == 0:
            for index, token in enumerate(token_ids):
                self.tokens[0, index].fill_(token)


class LibraryDecoder(Decoder):
    """Records transformers' own forward pass."""

    def __init__(
        self,
        stage: Stage,
        cache: StageCache,
        config: Any,
        tokens: int = 1,
        draft: DraftHead | None = None,
        *,
        together: bool = False,
    ) -> None:
        """`draft` is the draft head that reads the tokens after the last stage. With `together`, a token's results are
        bit-identical however many tokens a step has."""
        super().__init__(stage, int(config.hidden_size), tokens)
        self._cache = cache
        self._place = TokenPlace(stage.device, tokens, has_neighbours=cache.has_neighbours)
        self._has_kernels = stage.device.type == "cuda"
        self._together = together or tokens > 1
        self._note = cache.history.note if tokens > 1 else None
        self._reading = None if draft is None else RecordedReading(draft, tokens)

    def record(self, pool: Any = None) -> None:
        self._cache.record(self._place)
        try:
            # Not at 0, where linear layers have no previous state.
            with torch.inference_mode():
                self._cache.begin(0)
                self._cache.begin(1)
                self.ready([0] * self._place.tokens, 1, 1)
            if self._note is not None:
                self._cache.history.record(1, self._place.tokens)
            super().record(pool)
        finally:
            self._cache.history.forget()
            self._cache.record(None)

    def ready(self, token_ids: Sequence[int], position: int, turn: int) -> None:
        self._take(token_ids)
        self._cache.ready_for_step(position, turn, self._place)
        if self._reading is not None:
            self._reading.ready(token_ids, position, turn)

    def run(self) -> None:
        inputs = {"input_ids": self.tokens} if self.stage.index == 0 else {"inputs_embeds": self.hidden[None]}
        positions = self._place.turn[None]
        inner: Any = self.stage.inner
        head = None if self._reading is None else self._reading.model
        modules = (inner, self.stage.mixer, self.stage.head, head)
        fewer = few_kernels(*modules, together=self._together, note=self._note)
        with fewer if self._has_kernels else nullcontext():
            out = inner(**inputs, position_ids=positions, cache=self._cache, use_cache=True).last_hidden_state
            if self.logits is not None:
                self.logits.copy_(self.stage.every_logits(out))
            else:
                self.hidden.copy_(out[0])
            if self._reading is not None:
                self._reading.run(out)


class StageDecoder(Decoder):
    """Records the fused kernels for the models of `parkd_engine.forward.dense`, one token at a time."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        from parkd_engine.kernels.attend import DecodeAttention

        super().__init__(stage, int(config.hidden_size))
        self.layers = dense_layers(stage, cache)
        first = self.layers[0]
        kv_heads, dim = first.key_rows.shape[1:]
        q_width = first.output.in_features
        device, dtype = stage.device, stage.dtype
        self.eps = float(config.rms_norm_eps)
        self._cache = cache
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        """The token's row."""
        self.turn, self.first = self.position, None
        """The token's rotary position, and the seat's first row: others than these only beside other seats."""
        if cache.has_neighbours:
            self.turn, self.first = torch.zeros_like(self.position), torch.zeros_like(self.position)
        self._qkv = torch.empty(q_width + 2 * kv_heads * dim, dtype=dtype, device=device)
        self._kv_width = kv_heads * dim
        self._query = torch.empty(q_width, dtype=dtype, device=device)
        self._attended = torch.empty(q_width, dtype=dtype, device=device)
        self._gated = torch.empty(config.intermediate_size, dtype=dtype, device=device)
        self._attend = DecodeAttention(q_width // dim, kv_heads, dim, device, codes=first.scale_rows is not None)

    def ready(self, token_ids: Sequence[int], position: int, turn: int) -> None:
        assert turn == position, "models of this kind read no pictures"
        self._take(token_ids)
        base = self._cache.base
        self.position.fill_(base + position)
        if self.first is not None:
            self.turn.fill_(position)
            self.first.fill_(base)

    def run(self) -> None:
        from parkd_engine.kernels.matvec import gated, matvec
        from parkd_engine.kernels.rows import write_rows

        inner: Any = self.stage.inner
        hidden = self.hidden[0]
        if self.stage.index == 0:
            hidden.copy_(inner.embed_tokens(self.tokens)[0, 0])
        cos, sin = inner.rotary_emb(hidden.view(1, 1, -1), position_ids=self.turn.view(1, 1))
        q, k, v = torch.split(self._qkv[None], [len(self._query), self._kv_width, self._kv_width], dim=1)
        for layer in self.layers:
            keys, values, scales = layer.all_rows
            matvec(hidden, layer.qkv, self._qkv, norm=layer.input_norm, eps=self.eps)
            write_rows(
                q,
                k,
                v,
                cos,
                sin,
                self.position,
                self._query,
                keys,
                values,
                scales,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.eps,
            )
            self._attend(
                self._query,
                keys,
                values,
                self.position,
                self._attended,
                layer.scaling,
                scales,
                first=self.first,
            )
            matvec(self._attended, (layer.output,), hidden, residual=hidden)
            gated(hidden, layer.gate, layer.up, self._gated, norm=layer.post_norm, eps=self.eps)
            matvec(self._gated, (layer.down,), hidden, residual=hidden)
        if self.logits is not None:
            matvec(hidden, (self.stage.head,), self.logits[0], norm=inner.norm.weight, eps=self.eps)


class DecodeGraph:
    """The graphs of all stages: token ids in, logits after each token out."""

    def __init__(
        self,
        steps: Mapping[int, Sequence[Decoder]],
        handoffs: Sequence[HandOff],
        guessing: RecordedGuessing | None = None,
    ) -> None:
        """`steps` maps the number of tokens in a step to the decoders of all stages; `handoffs` lead from each stage to
        the next. `guessing` is the recorded draft head."""
        self._steps = {tokens: tuple(decoders) for tokens, decoders in steps.items()}
        self._handoffs = tuple(handoffs)
        self.guessing = guessing

    def takes(self, tokens: int) -> bool:
        """Whether a step of this many tokens was recorded."""
        return tokens in self._steps

    def step(self, token_ids: Sequence[int], position: int, offset: int = 0) -> torch.Tensor:
        """Runs tokens from `position` on and writes their rows in every stage, without waiting. `offset` is added to
        positions to get rotary positions.

        Returns the logits, float32 `[tokens, vocab]`, on the last device.
        """
        decoders = self._steps[len(token_ids)]
        for index, decoder in enumerate(decoders):
            decoder.ready(token_ids, position, position + offset)
            if index:
                self._handoffs[index - 1].into(decoders[index - 1].hidden, decoder.hidden)
            decoder.replay()
        logits = decoders[-1].logits
        assert logits is not None, "the last stage has the head"
        return logits.clone()


def record_decoding(
    config: Any,
    stages: Sequence[Stage],
    caches: Sequence[StageCache],
    handoffs: Sequence[HandOff],
    progress: Progress | None = None,
    *,
    dense: bool,
    draft: DraftHead | None = None,
    guesses: int = 0,
    pools: GraphPools | None = None,
) -> DecodeGraph | None:
    """Records every stage: with fused kernels if `dense` (see `dense.refusal`), else transformers' forward pass. With a
    `draft` head, also records steps of a token and `guesses` guesses, and the head itself. Overwrites the first rows of
    every arena and the fixed state. With `pools`, graphs of one device share the memory of their intermediate results.

    Returns None and logs the reason if compiling or recording fails; decoding then runs unrecorded.
    """
    steps: dict[int, list[Decoder]] = {1: []} if draft is None else {1: [], 1 + guesses: []}
    count = 0
    try:
        for tokens, decoders in steps.items():
            for stage, cache in zip(stages, caches, strict=True):
                if progress is not None:
                    progress("Preparing the decode kernels", count / (len(steps) * len(stages)))
                head = draft if stage is stages[-1] else None
                decoder: Decoder
                if dense:
                    decoder = StageDecoder(stage, cache, config)
                else:
                    decoder = LibraryDecoder(stage, cache, config, tokens, head, together=draft is not None)
                decoder.record(None if pools is None else pools.of(stage.device))
                decoders.append(decoder)
                count += 1
        guessing = None if draft is None else RecordedGuessing(draft)
        if guessing is not None:
            guessing.record(None if pools is None else pools.of(stages[-1].device))
    except Exception as error:
        log.warning("decoding runs without CUDA graphs, because recording failed: %s: %s", type(error).__name__, error)
        return None
    if progress is not None:
        progress("Preparing the decode kernels", 1.0)
    return DecodeGraph(steps, handoffs, guessing)
