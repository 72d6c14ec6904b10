"""Decoding as one CUDA graph a stage.

    token, position -> | graph of stage 0 | -> hidden -> | graph of stage 1 | -> logits
                           writes row `position`            writes row `position`

A graph is recorded once and replayed for every token: addresses are fixed, the position is read from the device.
For the models of `engine.dense` a layer is seven kernels (`engine.kernels`) in place of the library's several dozen; of
the others the library's own forward is recorded, with rows written and attended to where the device says
(`engine.placed`), and in fewer kernels what is known how (`engine.one_token`). Rounding differs from the unrecorded
forward in the last bits; what a token leaves is that of its own path, so parked state stays exact.

What cannot be recorded (a forward that asks the device something midway) decodes as on CPU.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from engine.cache import StageCache
from engine.dense import dense_layers
from engine.handoff import HandOff
from engine.one_token import few_kernels
from engine.placed import TokenPlace
from engine.stages import Stage

log = logging.getLogger("parkd.engine")

WARM_UP_RUNS = 2

Progress = Callable[[str, float], None]


class Decoder(ABC):
    """One stage's forward of one token, over buffers that never move."""

    def __init__(self, stage: Stage, hidden_size: int) -> None:
        device = stage.device
        self.stage = stage
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        """Read by the first stage."""
        self.hidden = torch.zeros(hidden_size, dtype=stage.dtype, device=device)
        """`[hidden]`, what comes in and what goes out."""
        self.logits = None
        """float32 `[vocab]`; last stage only."""
        if stage.head is not None:
            head: Any = stage.head
            self.logits = torch.empty(head.weight.shape[0], dtype=torch.float32, device=device)
        self._graph: Any = None

    def record(self) -> None:
        """Compiles the kernels and records the graph. The first rows are written: nothing may be live."""
        with torch.cuda.device(self.stage.device), torch.inference_mode():
            side = torch.cuda.Stream(self.stage.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.stage.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    self.run()
            torch.cuda.current_stream(self.stage.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may be registering memory meanwhile: their calls must not spoil the recording.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.run()
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    @abstractmethod
    def ready(self, position: int, turn: int) -> None:
        """Before a replay: the token comes at `position`, and rotary positions give it `turn`. Only queues work."""

    @abstractmethod
    def run(self) -> None:
        """Queues the kernels of one token."""


class LibraryDecoder(Decoder):
    """The library's forward."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        super().__init__(stage, int(config.hidden_size))
        self._cache = cache
        self._place = TokenPlace(stage.device)
        self._has_kernels = stage.device.type == "cuda"

    def record(self) -> None:
        self._cache.record(self._place)
        try:
            # Not at 0, where layers of linear attention have no state to go on from.
            with torch.inference_mode():
                self._cache.begin(0)
                self.ready(1, 1)
            super().record()
        finally:
            self._cache.record(None)

    def ready(self, position: int, turn: int) -> None:
        self._cache.ready_for_token(position, turn, self._place)

    def run(self) -> None:
        inputs = {"input_ids": self.token} if self.stage.index == 0 else {"inputs_embeds": self.hidden.view(1, 1, -1)}
        positions = self._place.turn.view(1, 1)
        inner: Any = self.stage.inner
        with few_kernels(inner, self.stage.mixer, self.stage.head) if self._has_kernels else nullcontext():
            out = inner(**inputs, position_ids=positions, cache=self._cache, use_cache=True).last_hidden_state
            if self.logits is not None:
                self.logits.copy_(self.stage.logits(out))
            else:
                self.hidden.copy_(out[0, 0])


class StageDecoder(Decoder):
    """The few kernels."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        from engine.kernels.attend import DecodeAttention

        super().__init__(stage, int(config.hidden_size))
        self.layers = dense_layers(stage, cache)
        first = self.layers[0]
        kv_heads, dim = first.key_rows.shape[1:]
        q_width = first.output.weight.shape[1]
        device, dtype = stage.device, stage.dtype
        self.eps = float(config.rms_norm_eps)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._qkv = torch.empty(q_width + 2 * kv_heads * dim, dtype=dtype, device=device)
        self._kv_width = kv_heads * dim
        self._query = torch.empty(q_width, dtype=dtype, device=device)
        self._attended = torch.empty(q_width, dtype=dtype, device=device)
        self._gated = torch.empty(config.intermediate_size, dtype=dtype, device=device)
        self._attend = DecodeAttention(q_width // dim, kv_heads, dim, device, codes=first.scale_rows is not None)

    def ready(self, position: int, turn: int) -> None:
        assert turn == position, "models of this kind read no pictures"
        self.position.fill_(position)

    def run(self) -> None:
        from engine.kernels.matvec import gated, matvec
        from engine.kernels.rows import write_rows

        inner: Any = self.stage.inner
        hidden = self.hidden
        if self.stage.index == 0:
            hidden.copy_(inner.embed_tokens(self.token)[0, 0])
        cos, sin = inner.rotary_emb(hidden.view(1, 1, -1), position_ids=self.position.view(1, 1))
        q, k, v = torch.split(self._qkv[None], [len(self._query), self._kv_width, self._kv_width], dim=1)
        for layer in self.layers:
            matvec(hidden, layer.qkv, self._qkv, norm=layer.input_norm, eps=self.eps)
            write_rows(
                q,
                k,
                v,
                cos,
                sin,
                self.position,
                self._query,
                layer.key_rows,
                layer.value_rows,
                layer.scale_rows,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.eps,
            )
            self._attend(
                self._query,
                layer.key_rows,
                layer.value_rows,
                self.position,
                self._attended,
                layer.scaling,
                layer.scale_rows,
            )
            matvec(self._attended, (layer.output,), hidden, residual=hidden)
            gated(hidden, layer.gate, layer.up, self._gated, norm=layer.post_norm, eps=self.eps)
            matvec(self._gated, (layer.down,), hidden, residual=hidden)
        if self.logits is not None:
            matvec(hidden, (self.stage.head,), self.logits, norm=inner.norm.weight, eps=self.eps)


class DecodeGraph:
    """All stages' graphs: a token in, its logits out."""

    def __init__(self, decoders: Sequence[Decoder], handoffs: Sequence[HandOff]) -> None:
        """`handoffs` lead from each stage to the next."""
        self._decoders = tuple(decoders)
        self._handoffs = tuple(handoffs)

    def step(self, token_id: int, position: int, offset: int = 0) -> torch.Tensor:
        """Runs one token at `position`, writing that row in every stage; waits for nothing. `offset` is by how much
        rotary positions run ahead of rows.

        Returns its logits, float32 `[vocab]` on the last device.
        """
        self._decoders[0].token.fill_(token_id)
        for index, decoder in enumerate(self._decoders):
            decoder.ready(position, position + offset)
            if index:
                self._handoffs[index - 1].into(self._decoders[index - 1].hidden, decoder.hidden)
            decoder.replay()
        logits = self._decoders[-1].logits
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
) -> DecodeGraph | None:
    """Records every stage: of few kernels if the model is `dense` (`dense.refusal`), else the library's forward. The
    first rows of every arena and the fixed state are overwritten.

    None, with the reason in the log, if a compiler, a driver or the forward will not: the slower way still answers.
    """
    decoders: list[Decoder] = []
    try:
        for index, (stage, cache) in enumerate(zip(stages, caches, strict=True)):
            if progress is not None:
                progress("Preparing the decode kernels", index / len(stages))
            decoder = StageDecoder(stage, cache, config) if dense else LibraryDecoder(stage, cache, config)
            decoder.record()
            decoders.append(decoder)
    except Exception as error:
        log.warning("decoding without CUDA graphs: recording failed: %s: %s", type(error).__name__, error)
        return None
    if progress is not None:
        progress("Preparing the decode kernels", 1.0)
    return DecodeGraph(decoders, handoffs)
