"""Decoding as one CUDA graph a stage, for the models of `engine.dense`.

    token, position -> | graph of stage 0 | -> hidden -> | graph of stage 1 | -> logits
                           writes row `position`            writes row `position`

A graph is recorded once and replayed for every token: addresses are fixed, the position is read from the device.
Inside, a layer is seven kernels (`engine.kernels`) in place of the library's several dozen. Rounding differs from the
library's forward in the last bits; the rows a token leaves are those of its own path, so parked state stays exact.

Models of another make decode through the library's forward, as on CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.cache import StageCache
from engine.dense import dense_layers
from engine.stages import Stage

log = logging.getLogger("parkd.engine")

WARM_UP_RUNS = 2

Progress = Callable[[str, float], None]


class StageDecoder:
    """One stage's forward of one token, over buffers that never move."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        from engine.kernels.attend import DecodeAttention

        self.stage = stage
        self.layers = dense_layers(stage, cache)
        first = self.layers[0]
        kv_heads, dim = first.key_rows.shape[1:]
        q_width = first.output.weight.shape[1]
        device, dtype = stage.device, stage.dtype
        self.eps = float(config.rms_norm_eps)
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        """Read by the first stage."""
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(config.hidden_size, dtype=dtype, device=device)
        """`[hidden]`, what comes in and what goes out."""
        self._qkv = torch.empty(q_width + 2 * kv_heads * dim, dtype=dtype, device=device)
        self._kv_width = kv_heads * dim
        self._query = torch.empty(q_width, dtype=dtype, device=device)
        self._attended = torch.empty(q_width, dtype=dtype, device=device)
        self._gated = torch.empty(config.intermediate_size, dtype=dtype, device=device)
        self._attend = DecodeAttention(q_width // dim, kv_heads, dim, device)
        self.logits = None
        """float32 `[vocab]`; last stage only."""
        if stage.head is not None:
            head: Any = stage.head
            self.logits = torch.empty(head.weight.shape[0], dtype=torch.float32, device=device)
        self._graph: Any = None

    def record(self) -> None:
        """Compiles the kernels and records the graph. Row 0 is written: nothing may be live."""
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

    def run(self) -> None:
        """Queues the kernels of one token."""
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

    def __init__(self, decoders: Sequence[StageDecoder]) -> None:
        self._decoders = tuple(decoders)

    def step(self, token_id: int, position: int) -> torch.Tensor:
        """Runs one token at `position`, writing that row in every stage; waits for nothing.

        Returns its logits, float32 `[vocab]` on the last device.
        """
        self._decoders[0].token.fill_(token_id)
        before: StageDecoder | None = None
        for decoder in self._decoders:
            decoder.position.fill_(position)
            if before is not None:
                # Ordered behind the stage before and ahead of this one by the copy itself, with or without peer access.
                decoder.hidden.copy_(before.hidden, non_blocking=True)
            decoder.replay()
            before = decoder
        logits = self._decoders[-1].logits
        assert logits is not None, "the last stage has the head"
        return logits.clone()


def record_decoding(
    config: Any, stages: Sequence[Stage], caches: Sequence[StageCache], progress: Progress | None = None
) -> DecodeGraph | None:
    """Records every stage, for which nothing speaks (`dense.refusal`). Row 0 of every arena is overwritten.

    None, with the reason in the log, if a compiler or driver will not: the slower way still answers.
    """
    decoders = []
    try:
        for index, (stage, cache) in enumerate(zip(stages, caches, strict=True)):
            if progress is not None:
                progress("Preparing the decode kernels", index / len(stages))
            decoder = StageDecoder(stage, cache, config)
            decoder.record()
            decoders.append(decoder)
    except Exception as error:
        log.warning("decoding without CUDA graphs: recording failed: %s: %s", type(error).__name__, error)
        return None
    if progress is not None:
        progress("Preparing the decode kernels", 1.0)
    return DecodeGraph(decoders)
