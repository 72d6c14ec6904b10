"""Stages: each runs a contiguous range of layers on one device, in a forward pass of its own.

    token ids -> | stage 0: embedding, layers [0, a) | -> hidden -> | stage 1: layers [a, n), norm, head | -> logits
                        device 0                                            device 1

A stage is a copy of the library's model object whose other layers are replaced by pass-throughs. Layer indices stay the
same, and every architecture runs its own code.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from parkd_engine.arenas.cache import StageCache
from parkd_engine.families.layer_shapes import experts_of
from parkd_engine.families.layer_state import STREAMS, streams_of
from parkd_engine.families.multimodal import language_config, language_model
from parkd_engine.families.records import family_of
from parkd_engine.forward.attention import ATTENTION_NAME, register_attention
from parkd_engine.forward.delta_net import choose_by_device
from parkd_engine.forward.indexer import replace_indexers
from parkd_engine.forward.latents import absorb_projections
from parkd_engine.vision.chunks import ChunkImages
from parkd_engine.weights.host_experts import (
    FetchRoom,
    HostExperts,
    choose_way,
    expert_bytes,
    experts_module,
    room_bytes,
)
from parkd_engine.weights.tiles import put_tiles

MIXER = "hyper_connection_mixer"
"""Name of the module that mixes several residual streams into one hidden state; it takes the place of the norm after
the last layer."""
EXPERTS = "grouped_mm"
"""The library's code for experts. It sums in a fixed order, so that the same shapes give the same bits, and reads
nothing back from the device, so that it can be recorded."""
EMBEDDING_SCALE = "embedding_multiplier"


class PassThrough(nn.Module):
    """Takes the place of a layer that belongs to another stage."""

    def __init__(self, layer: nn.Module, *, gives_tuple: bool = False) -> None:
        """`layer` is the one replaced. Some models read its kind off it, so its plain attributes are kept."""
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str)})
        self._gives_tuple = gives_tuple

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return (hidden_states,) if self._gives_tuple else hidden_states


class Stage:
    """The layers `[first_layer, end_layer)` on one device."""

    def __init__(
        self,
        index: int,
        first_layer: int,
        end_layer: int,
        device: torch.device,
        inner: nn.Module,
        head: nn.Module | None,
        logit_scale: float = 1.0,
        streams: int = 1,
        logit_factor: float = 1.0,
        mixer: nn.Module | None = None,
        logit_cap: float | None = None,
    ) -> None:
        self.index = index
        self.first_layer = first_layer
        self.end_layer = end_layer
        self.device = device
        self.inner = inner
        self.head = head
        """Maps hidden states to logits; last stage only."""
        self.mixer = mixer
        """Mixes several residual streams into one hidden state for the head; last stage only."""
        self.logit_scale = logit_scale
        """Logits are divided by this."""
        self.logit_factor = logit_factor
        """Logits are multiplied by this."""
        self.logit_cap = logit_cap
        """Logits are squeezed between its negative and itself, last of all; None: they are not."""
        self.streams = streams
        """Number of residual streams; stages pass them on concatenated."""
        self.chunk_memory: Any = None
        """Memory that the recorded layers of all seats share (`parkd_engine.forward.chunk_graphs`)."""
        self.step_histories: list[Any] = []
        """Of each seat, the states that its steps keep (`parkd_engine.forward.step_by_step`)."""
        self.host_experts: tuple[HostExperts, ...] = ()
        """The experts of this stage's layers that stay in main memory."""
        self.needs_ids = bool(getattr(getattr(inner, "config", None), "ple_layer_ids", None))
        """Whether the model's layers look up n-grams of token ids. Every stage needs the ids then."""
        layers: Any = inner.layers
        self.layers: tuple[Any, ...] = tuple(layers[index] for index in range(first_layer, end_layer))
        """The stage's own layers, without the pass-throughs."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.inner.layers)  # type: ignore[arg-type]

    @property
    def has_hooks(self) -> bool:
        """Whether a layer has forward hooks, which only the library's forward calls."""
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return next(parameter.dtype for parameter in self.inner.parameters())

    def forward(
        self,
        inputs: torch.Tensor,
        cache: StageCache,
        position: int,
        images: ChunkImages | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs `q` tokens at `[position, position + q)` and writes their rows through `cache`.

        `inputs`, on any device, are token ids, int64 `[1, q]`, in the first stage, and in others the previous stage's
        hidden states `[1, q, hidden]` (all streams concatenated). `images` are the chunk's images. `token_ids` are
        required if `needs_ids` is set. Returns hidden states `[1, q, hidden]` (all streams) on this stage's device,
        after the final norm in the last stage.
        """
        # A copy to the CPU must be synchronous: nothing makes the CPU wait until the GPU has sent its data.
        inputs = inputs.to(self.device, non_blocking=self.device.type == "cuda")
        stop = position + inputs.shape[1]
        position_ids = torch.arange(position, stop, device=self.device).unsqueeze(0)
        name = "input_ids" if self.index == 0 else "inputs_embeds"
        arguments: dict[str, Any] = {}
        if images is not None and images.position_ids is not None:
            position_ids = images.position_ids.to(self.device)
        if images is not None and images.spans:
            arguments["image_spans"] = images.spans
        if self.index == 0 and images is not None and images.rows:
            name, inputs = "inputs_embeds", self._embedded(inputs, images.rows)
        if images is not None and images.added:
            arguments |= self._added(images.added, stop - position)
        if self.needs_ids and name == "inputs_embeds":
            assert token_ids is not None, "layers of this stage look up token ids"
            arguments["ple_input_ids"] = token_ids.to(self.device, non_blocking=self.device.type == "cuda")
        cache.begin(position)
        # Our own kernels run on the current device, wherever their tensors are.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            output = self.inner(**{name: inputs}, position_ids=position_ids, cache=cache, use_cache=True, **arguments)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def embed(self, token_ids: npt.NDArray[np.int64], rows: Sequence[tuple[int, torch.Tensor]] = ()) -> torch.Tensor:
        """Embeddings `[1, q, hidden]` of ids `[q]`, with image `rows` put in at their positions; first stage only."""
        return self._embedded(torch.from_numpy(token_ids).to(self.device)[None], rows)

    def _embedded(self, ids: torch.Tensor, rows: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Embeddings `[1, q, hidden]` of ids `[1, q]`, with image `rows` put in at their positions."""
        ids = ids.clone()
        for start, values in rows:
            ids[0, start : start + len(values)] = 0  # the image token's id may be outside the embedding
        inner: Any = self.inner
        embedded: torch.Tensor = inner.get_input_embeddings()(ids)
        for start, values in rows:
            embedded[0, start : start + len(values)] = values.to(embedded.dtype)
        return embedded

    def _added(self, added: Sequence[tuple[int, torch.Tensor]], tokens: int) -> dict[str, Any]:
        """The arguments with which the library's code adds images to hidden states after its first layers. It does so
        behind pass-throughs too, which here must change nothing."""
        values = torch.cat([each for _, each in added], dim=1).to(self.device)
        if self.first_layer >= len(values):
            return {}
        seen = torch.zeros((1, tokens), dtype=torch.bool, device=self.device)
        for start, each in added:
            seen[0, start : start + each.shape[1]] = True
        values = values[: self.end_layer]
        values[: self.first_layer] = 0  # The concatenation is a copy.
        return {"visual_pos_masks": seen, "deepstack_visual_embeds": list(values)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 `[vocab]`, of the last token of `hidden` as returned by `forward`; last stage only."""
        return self.every_logits(hidden[:, -1:])[-1]

    def every_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 `[q, vocab]`, of all tokens of `hidden` as returned by `forward`; last stage only."""
        return self.scores(hidden if self.mixer is None else self.mixer(hidden))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 `[q, vocab]`, of hidden states `[1, q, hidden]` whose streams are mixed already."""
        assert self.head is not None, "only the last stage has the head"
        logits: torch.Tensor = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits / self.logit_scale
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return logits[0].float()


def place(
    model: Any,
    ranges: Sequence[tuple[int, int]],
    devices: Sequence[str | torch.device],
    host_layers: Collection[int] = (),
) -> list[Stage]:
    """Splits a causal language model into stages and puts each on its device. The routed experts of `host_layers` stay
    in main memory.

    Weights that are on the right device already are shared with `model`; the others are copied. `model` still works,
    but uses the engine's attention from now on, and on CPUs has int4 codes in tiles. Drop it to free the weights that
    were copied.
    """
    register_attention()
    model.eval()
    decoder = language_model(model)
    language_config(model.config)._attn_implementation = ATTENTION_NAME
    decoder.config._attn_implementation = ATTENTION_NAME
    if decoder._can_set_experts_implementation():
        decoder.config._experts_implementation = EXPERTS
    replace_indexers(decoder)
    if all(torch.device(name).type == "cpu" for name in devices):
        put_tiles(model)
    if family_of(decoder.config).has_latents:
        absorb_projections(decoder.layers, ATTENTION_NAME)
    if any(torch.device(name).type == "cpu" for name in devices):
        choose_by_device(decoder.layers)
    stages = []
    for index, ((first, end), name) in enumerate(zip(ranges, devices, strict=True)):
        device = torch.device(name)
        is_last = index == len(ranges) - 1
        moved: dict[int, torch.Tensor] = {}
        inner = _cut(decoder, first, end, is_first=index == 0, is_last=is_last)
        hosted = _hosted(decoder, [layer for layer in host_layers if first <= layer < end], device)
        head = _moved(model.get_output_embeddings(), device, moved) if is_last else None
        scale = float(getattr(model.config, "logits_scaling", None) or 1.0)
        factor = float(getattr(model.config, "lm_head_multiplier", None) or 1.0)
        streams, cap = streams_of(decoder.config), getattr(decoder.config, "final_logit_softcapping", None)
        mixer = _moved(decoder._modules[MIXER], device, moved) if is_last and streams > 1 else None
        moved_inner = _moved(inner, device, moved, {id(part.replaced): part for part in hosted})
        stage = Stage(index, first, end, device, moved_inner, head, scale, streams, factor, mixer, cap)
        stage.host_experts = tuple(hosted)
        stages.append(stage)
    return stages


def _hosted(decoder: Any, layers: Sequence[int], device: torch.device) -> list[HostExperts]:
    """What takes the place of the experts of these layers, which share one room on the device."""
    text = decoder.config
    count, chosen = experts_of(text)
    found = [part for part in (experts_module(decoder.layers[layer], count) for layer in layers) if part is not None]
    if not found:
        return []
    room = FetchRoom(device, room_bytes(max(expert_bytes(part) for part in found), count))
    hosted = [HostExperts(part, room) for part in found]
    if device.type == "cuda":
        dtype = next(decoder.parameters()).dtype
        way = choose_way(hosted[0], chosen, device, dtype, int(text.hidden_size))
        for each in hosted:
            each.way = way
    return hosted


def _cut(inner: nn.Module, first: int, end: int, *, is_first: bool, is_last: bool) -> nn.Module:
    """A copy of the inner model with only the layers `[first, end)`. It shares the weight tensors."""
    twin = _twin(inner)
    family = family_of(inner.config)
    layers = [
        layer if first <= index < end else PassThrough(layer, gives_tuple=family.layers_give_tuples)
        for index, layer in enumerate(inner.layers)  # type: ignore[arg-type]
    ]
    twin._modules["layers"] = nn.ModuleList(layers).eval()
    if not is_first:
        embedding: Any = inner.get_input_embeddings()  # type: ignore[operator]
        twin._modules.update({name: None for name, part in twin._modules.items() if part is embedding})
        if hasattr(twin, EMBEDDING_SCALE):
            # The model would scale its input again; the first stage has done so.
            setattr(twin, EMBEDDING_SCALE, 1.0)
        if hasattr(twin.config, STREAMS):
            # The input has all streams already; the model must not repeat it. The layers keep the real count.
            twin.config = copy.copy(twin.config)
            setattr(twin.config, STREAMS, 1)
    if MIXER in twin._modules:
        # The last stage returns all streams too, for the mixer before the head and for a draft head.
        twin._modules[MIXER] = nn.Identity()
    elif not is_last:
        assert family.final_norm in twin._modules, "the norm after the last layer"
        twin._modules[family.final_norm] = nn.Identity()
    return twin


def _twin(module: nn.Module) -> nn.Module:
    """A shallow copy with its own tables of parameters, buffers, children and hooks."""
    twin = copy.copy(module)
    twin.__dict__.update({name: copy.copy(table) for name, table in vars(module).items() if isinstance(table, dict)})
    return twin


def moved_twin(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the module tree on `device`. Weights that are there already are shared."""
    return _moved(module, device, {})


def _moved(
    module: nn.Module,
    device: torch.device,
    moved: dict[int, torch.Tensor],
    instead: Mapping[int, nn.Module] = MappingProxyType({}),
) -> nn.Module:
    """A copy of the module tree with every tensor on `device`. `moved` keeps tied tensors tied. The modules whose `id`
    is in `instead` are replaced."""
    if id(module) in instead:
        return instead[id(module)]
    twin = _twin(module)
    for name, parameter in twin._parameters.items():
        if parameter is not None:
            there = moved.setdefault(id(parameter), parameter.detach().to(device))
            twin._parameters[name] = nn.Parameter(there, requires_grad=False)
    for name, buffer in twin._buffers.items():
        if buffer is not None:
            twin._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    for name, child in twin._modules.items():
        if child is not None:
            twin._modules[name] = _moved(child, device, moved, instead)
    return twin
