"""Decoding as one CUDA graph a stage, for the decoder layers most dense models share.

    token, position -> | graph of stage 0 | -> hidden -> | graph of stage 1 | -> logits
                           writes row `position`            writes row `position`

A graph is recorded once and replayed for every token: addresses are fixed, the position is read from the device.
Inside, a layer is seven kernels (`engine.kernels`) in place of the library's several dozen. Rounding differs from the
library's forward in the last bits; the rows a token leaves are those of its own path, so parked state stays exact.

Stages whose layers are of another make decode through the library's forward, as on CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.arena import StageArena
from engine.cache import StageCache
from engine.kernels import has_triton
from engine.layout import layer_kinds
from engine.stages import Stage

log = logging.getLogger("parkd.engine")

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Whose layers are: norm, attention over plain rotary positions, norm, silu-gated product; each with its residual."""
DTYPES = frozenset({torch.bfloat16, torch.float16})
STEADY_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose frequencies do not change with the length."""
WARM_UP_RUNS = 2

Progress = Callable[[str, float], None]


def refusal(config: Any, stages: Sequence[Stage], arenas: Sequence[StageArena]) -> str | None:
    """Why these stages cannot be recorded, None if they can."""
    if any(stage.device.type != "cuda" for stage in stages):
        return "a stage is not on a CUDA device"
    if not has_triton():
        return "Triton is not installed"
    if config.model_type not in ARCHITECTURES:
        return f"the layers of {config.model_type} are not known to it"
    if set(layer_kinds(config)) != {"full_attention"} or getattr(config, "sliding_window", None):
        return "not all layers attend to everything"
    if getattr(config, "hidden_act", None) != "silu" or getattr(config, "mlp_bias", False):
        return "the feed-forward part is of another make"
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") not in STEADY_ROTARY or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary positions are of another make"
    kept = {field.dtype for arena in arenas for field in arena.layout.row_fields}
    if len(kept) != 1 or not kept <= DTYPES or any(stage.dtype not in kept for stage in stages):
        return f"it computes or keeps rows in other types than {', '.join(sorted(map(str, DTYPES)))}"
    return None


@dataclass(frozen=True, eq=False)
class _Layer:
    """One decoder layer's weights and rows."""

    input_norm: Any
    qkv: tuple[Any, ...]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Any
    post_norm: Any
    gate: Any
    up: Any
    down: Any
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    scaling: float


def _layer_of(module: Any, rows: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    return _Layer(
        module.input_layernorm,
        (attention.q_proj, attention.k_proj, attention.v_proj),
        getattr(getattr(attention, "q_norm", None), "weight", None),
        getattr(getattr(attention, "k_norm", None), "weight", None),
        attention.o_proj,
        module.post_attention_layernorm,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        rows.key_rows,
        rows.value_rows,
        float(attention.scaling),
    )


class StageDecoder:
    """One stage's forward of one token, over buffers that never move."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        from engine.kernels.attend import DecodeAttention

        inner: Any = stage.inner
        self.stage = stage
        span = range(stage.first_layer, stage.end_layer)
        self._modules = [inner.layers[index] for index in span]
        self.layers = [_layer_of(inner.layers[index], cache.layers[index]) for index in span]
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

    @property
    def has_hooks(self) -> bool:
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)

    def replay(self) -> None:
        self._graph.replay()

    def run(self) -> None:
        """Queues the kernels of one token."""
        from engine.kernels.matvec import gated, matvec
        from engine.kernels.rows import write_row

        inner: Any = self.stage.inner
        hidden = self.hidden
        if self.stage.index == 0:
            hidden.copy_(inner.embed_tokens(self.token)[0, 0])
        cos, sin = inner.rotary_emb(hidden.view(1, 1, -1), position_ids=self.position.view(1, 1))
        cos, sin = cos.flatten(), sin.flatten()
        for layer in self.layers:
            matvec(hidden, layer.qkv, self._qkv, norm=layer.input_norm.weight, eps=self.eps)
            write_row(
                self._qkv,
                cos,
                sin,
                self.position,
                self._query,
                layer.key_rows,
                layer.value_rows,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.eps,
            )
            self._attend(self._query, layer.key_rows, layer.value_rows, self.position, self._attended, layer.scaling)
            matvec(self._attended, (layer.output,), hidden, residual=hidden)
            gated(hidden, layer.gate, layer.up, self._gated, norm=layer.post_norm.weight, eps=self.eps)
            matvec(self._gated, (layer.down,), hidden, residual=hidden)
        if self.logits is not None:
            matvec(hidden, (self.stage.head,), self.logits, norm=inner.norm.weight, eps=self.eps)


class DecodeGraph:
    """All stages' graphs: a token in, its logits out."""

    def __init__(self, decoders: Sequence[StageDecoder]) -> None:
        self._decoders = tuple(decoders)

    @property
    def is_true(self) -> bool:
        """Whether the recording is what the layers would do now: not while hooks on them add to it."""
        return not any(decoder.has_hooks for decoder in self._decoders)

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
    config: Any,
    stages: Sequence[Stage],
    arenas: Sequence[StageArena],
    caches: Sequence[StageCache],
    progress: Progress | None = None,
) -> DecodeGraph | None:
    """Records every stage; None, with the reason in the log, if decoding stays with the library's forward.

    Row 0 of every arena is overwritten.
    """
    if (reason := refusal(config, stages, arenas)) is not None:
        log.info("decoding without CUDA graphs: %s", reason)
        return None
    decoders = []
    try:
        for index, (stage, cache) in enumerate(zip(stages, caches, strict=True)):
            if progress is not None:
                progress("Preparing the decode kernels", index / len(stages))
            decoder = StageDecoder(stage, cache, config)
            decoder.record()
            decoders.append(decoder)
    except Exception as error:  # a compiler or driver that will not: the slower way still answers
        log.warning("decoding without CUDA graphs: recording failed: %s: %s", type(error).__name__, error)
        return None
    if progress is not None:
        progress("Preparing the decode kernels", 1.0)
    return DecodeGraph(decoders)
