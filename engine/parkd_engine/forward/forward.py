"""One forward pass through all stages: by transformers' code, or by fused kernels for models they support.

ids -> | stage 0 | -> hidden -> | stage 1 | -> hidden -> | head | -> logits
           rows                     rows
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parkd.errors import EngineFailure
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.streams import record_event
from parkd_engine.draft.head import Choose, DraftHead
from parkd_engine.failures import stage_failed
from parkd_engine.forward.chunk_graphs import record_chunks
from parkd_engine.forward.decode_graph import DecodeGraph, record_decoding
from parkd_engine.forward.dense import DenseStage, no_recording, refusal
from parkd_engine.forward.graphs import GraphPools
from parkd_engine.forward.handoff import HandOff
from parkd_engine.forward.one_token import chunks_in_fewer_kernels
from parkd_engine.forward.stages import Stage
from parkd_engine.moves.captures import CapturesUnderWay
from parkd_engine.vision.chunks import NO_IMAGES, ChunkImages

log = logging.getLogger("parkd.engine")


class ModelForward:
    """Writes rows and advances fixed state. Keeps no position: the caller commits the new one or goes back.

    Never overwrites rows that one of `captures` has yet to copy.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arenas: Sequence[StageArena],
        caches: Sequence[StageCache],
        config: Any,
        captures: CapturesUnderWay,
        draft: DraftHead | None,
        *,
        guesses: int = 0,
        peer_access: bool = True,
        beside: ModelForward | None = None,
    ) -> None:
        """`guesses` is the most tokens that the draft head guesses at once. Without `peer_access`, hidden states pass
        between GPUs through main memory. `beside` is that of the first seat, if this is another one: both share the
        memory of what is recorded."""
        self._stages = tuple(stages)
        self._arenas = tuple(arenas)
        self._caches = tuple(caches)
        self._config = config
        self._captures = captures
        self._draft = draft
        self._guesses = guesses
        self._handoffs = [
            HandOff(one.device, other.device, peer_access=peer_access) for one, other in pairwise(self._stages)
        ]
        self._pools: GraphPools = GraphPools() if beside is None else beside._pools
        self.decode_graph: DecodeGraph | None = None
        """If None, every step goes through `run`."""
        self.dense: Sequence[DenseStage] = ()

    def record(self, chunk_tokens: int, progress: Callable[[str, float], None] | None = None) -> bool:
        """Records decoding, and switches chunks to fused kernels or recorded layers, where possible. Overwrites rows
        and fixed state.

        Returns False if the model or the devices do not allow recording, so that nothing was tried.
        """
        reason = no_recording(self._config, self._stages)
        if self._draft is not None and not self._draft.can_be_recorded:
            reason = "the input of the draft head has no fixed address"
        if reason is not None:
            if any(stage.device.type == "cuda" for stage in self._stages):  # On a CPU nobody expects it.
                log.info("decoding is not recorded: %s", reason)
            return False
        kept = {field.dtype for arena in self._arenas for field in arena.layout.row_fields if field.name != "scale"}
        if (reason := refusal(self._config, self._stages[0].dtype, kept)) is not None:
            log.info("transformers' own forward pass is used: %s", reason)
        is_dense = reason is None
        self.decode_graph = record_decoding(
            self._config,
            self._stages,
            self._caches,
            self._handoffs,
            progress,
            dense=is_dense,
            draft=self._draft,
            guesses=self._guesses,
            pools=self._pools if self._caches[0].has_neighbours else None,
        )
        if self.decode_graph is None:
            return True
        pairs = list(zip(self._stages, self._caches, strict=True))
        if is_dense:
            self.dense = [DenseStage(stage, cache, self._config) for stage, cache in pairs]
        else:
            for stage, cache in pairs:
                chunks_in_fewer_kernels(stage.inner)
                record_chunks(stage, cache, chunk_tokens)
        return True

    def is_recorded(self, tokens: int) -> bool:
        """Whether a step of this many tokens was recorded and still applies: a layer with hooks needs `run`."""
        return self.decode_graph is not None and self.decode_graph.takes(tokens) and not self._has_hooks

    @property
    def _has_hooks(self) -> bool:
        return any(stage.has_hooks for stage in self._stages)

    def run(
        self, token_ids: npt.NDArray[np.int64], position: int, doing: str, images: ChunkImages = NO_IMAGES
    ) -> torch.Tensor:
        """Runs the tokens at `[position, position + q)`; returns the last stage's hidden states `[1, q, hidden]`.

        `doing` is `prefill` or `decode`. Raises StageFailed; the state of some layers has then advanced and that of
        others has not.
        """
        flow = ids = torch.from_numpy(token_ids).unsqueeze(0)
        stop = position + len(token_ids)
        dense = (
            bool(self.dense) and not self._has_hooks and doing == "prefill"
        )  # A dense prefill omits the last layer's output, which decoding needs.
        with torch.inference_mode():
            for stage, cache in zip(self._stages, self._caches, strict=True):
                try:
                    if stage.index:
                        flow = self._handoffs[stage.index - 1](flow)
                    self._before_write(stage, position, stop)
                    if dense:
                        flow = self.dense[stage.index].forward(flow, position)
                    else:
                        flow = stage.forward(flow, cache, position, images, ids)
                except EngineFailure:
                    raise
                except Exception as error:
                    raise stage_failed(stage.index, doing, error) from error
            if self._draft is not None:
                try:
                    self._draft.read(token_ids, position, flow, images)
                except Exception as error:
                    raise stage_failed(len(self._stages) - 1, "draft", error) from error
        return flow

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits after each token, float32 `[q, vocab]`. Raises StageFailed."""
        try:
            with torch.inference_mode():
                return self._stages[-1].every_logits(hidden)
        except Exception as error:
            raise stage_failed(len(self._stages) - 1, "decode", error) from error

    def step_recorded(self, token_ids: Sequence[int], position: int, offset: int) -> torch.Tensor:
        """Runs a step's tokens through the recorded graphs; returns their logits, float32 `[q, vocab]`. `offset` is
        added to rotary positions. Raises StageFailed."""
        assert self.decode_graph is not None, "nothing was recorded"
        try:
            for stage in self._stages:
                self._before_write(stage, position, position + len(token_ids))
            with torch.inference_mode():
                logits = self.decode_graph.step(token_ids, position, offset)
            for cache in self._caches:
                cache.history.was_replayed()
            return logits
        except Exception as error:
            raise stage_failed(len(self._stages) - 1, "decode", error) from error

    def guess(
        self, draft: DraftHead, token_id: int, position: int, offset: int, count: int, choose: Choose
    ) -> list[int]:
        """Returns up to `count` guesses of the tokens after `token_id` at `position`. Raises StageFailed."""
        guessing = None if self.decode_graph is None else self.decode_graph.guessing
        self._before_write(self._stages[-1], position, position + count)
        try:
            with torch.inference_mode():
                if guessing is not None and position > 0:
                    return guessing.guess(token_id, position, offset, count, choose)
                return draft.guess(token_id, position, count, choose)
        except EngineFailure:
            raise
        except Exception as error:
            raise stage_failed(len(self._stages) - 1, "draft", error) from error

    def _before_write(self, stage: Stage, start: int, stop: int) -> None:
        if stage.device.type == "cuda":
            base = self._arenas[stage.index].base
            stream = torch.cuda.current_stream(stage.device)
            self._captures.before_write(stage.index, stream, base + start, base + stop)


class ChunksUnderWay:
    """Bounds the chunks queued on CUDA to one for each stage, so that cancelling takes effect soon."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._device = stages[-1].device
        self._most = len(stages)
        self._running: deque[torch.cuda.Event] = deque()

    def add(self) -> None:
        """Notes that a chunk was queued. Waits for the earliest if there are too many."""
        if self._device.type != "cuda":
            return
        self._running.append(record_event(torch.cuda.current_stream(self._device)))
        if len(self._running) > self._most:
            self._running.popleft().synchronize()

    def wait(self) -> None:
        """Waits until all chunks are done."""
        while self._running:
            self._running.popleft().synchronize()
