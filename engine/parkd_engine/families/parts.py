"""Knows a model by its parts: a trial of the library's forward pass, without weights, memory or arithmetic.

The model is built on the meta device and reads a few tokens in three calls, with the library's own cache. What it hands
to its cache, to attention and from layer to layer is seen on the way:

    embedding -> layer 0 -> layer 1 -> ... -> last layer -> one norm -> head -> logits
                 cache      cache             cache

A model is accepted if that is all there is: every layer's state is of a known kind and shape, attention gets nothing
but what ours honours, and nothing is kept anywhere else. Each thing that is otherwise is a reason to refuse it, which
names the layer, setting or module. A family found so runs through the library's code alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from parkd.errors import UnsupportedModel
from parkd_engine.families.family import Family
from parkd_engine.families.layer_shapes import kv_shape, layer_kinds, window_of

TRIAL = "parkd trial"
"""Name of the attention and experts functions of a trial."""
CALLS = (5, 3, 1)
"""Tokens of each call: a chunk at the beginning, one after it, and a single token."""
DTYPE = torch.bfloat16
"""A half type, so that states which the model keeps in float32 are told from those in its own dtype."""
HONOURED = frozenset(
    {"scaling", "dropout", "sliding_window", "s_aux", "position_ids", "use_cache", "is_causal", "output_attentions"}
)
"""Arguments of attention that `forward.attention` honours, or that change nothing."""
OF_TRIALS = ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "dummy")
"""Kinds of layers that need no more knowledge than a trial finds."""
WITH_KEYS = ("full_attention", "hybrid")
"""Those that keep the keys and values of every token."""
RECURRENT = ("linear_attention", "conv", "hybrid")
MOST_FOUND = 8


@dataclass(frozen=True, slots=True)
class _Config:
    """A configuration that is equal to others of the same settings."""

    settings: str
    config: Any = field(compare=False)


def family_by_parts(config: Any) -> Family:
    """The family of a text model that no record names. Raises UnsupportedModel, whose message says why not."""
    return _found(_Config(config.to_json_string(use_diff=False), config))


@lru_cache(maxsize=MOST_FOUND)
def _found(given: _Config) -> Family:
    config = copy.deepcopy(given.config)
    vars(config).pop("quantization_config", None)  # How weights are stored changes nothing that passes through.
    name = str((getattr(config, "architectures", None) or [config.model_type])[0])
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None or (getattr(config, "architectures", None) and name != known.__name__):
        raise UnsupportedModel(f"{name} is not supported: it is no causal language model of text that transformers has")
    if other := sorted(set(layer_kinds(config)) - set(OF_TRIALS)):
        raise UnsupportedModel(f"{name} has layers of kind {', '.join(other)}, which are not supported")
    try:
        trial = _Trial(name, config)
        with torch.device("meta"), torch.no_grad():
            trial.run()
    except UnsupportedModel:
        raise
    except Exception as error:  # Whatever the library's code raises for a model that it cannot run so.
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnsupportedModel(
            f"{name} is not supported: a trial of its forward pass without weights failed ({reason[:200]})"
        ) from error
    return Family(
        model_type=config.model_type,
        architecture=known.__name__,
        linear_states=trial.linear_states if trial.states else None,
        final_norm=trial.final_norm,
        layers_give_tuples=trial.layers_give_tuples,
        is_windowed=True,
        by_parts=True,
    )


class _Trial:
    def __init__(self, name: str, config: Any) -> None:
        self._name = name
        self._config = config
        self.states: dict[int, tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]] = {}
        """Recurrent and convolution states, by layer."""
        self.final_norm = ""
        self.layers_give_tuples = False
        self._attended: list[int] = []

    def linear_states(self, config: Any, layer: int, dtype: torch.dtype) -> Any:  # noqa: ARG002
        return tuple((name, dtype if kept is DTYPE else kept, shape) for name, kept, shape in self.states[layer])

    def run(self) -> None:
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(self._config, dtype=DTYPE).eval()
        inner, head = model.base_model, model.get_output_embeddings()
        config = inner.config
        layers = getattr(inner, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != int(config.num_hidden_layers) or head is None:
            raise self._refusal("it is not made of `layers` between an embedding and an output head")
        with self._functions(), self._attention_of(config):
            before = _attributes(model)
            cache = DynamicCache(config=config)
            flow = _Flow(inner, head)
            position = 0
            with flow.watched():
                for count in CALLS:
                    ids = torch.zeros((1, count), dtype=torch.int64)
                    places = torch.arange(position, position + count)[None]
                    self._attended = []
                    logits = model(input_ids=ids, position_ids=places, cache=cache, use_cache=True).logits
                    self._check_flow(flow, logits)
                    self._check_attention(config)
                    position += count
            self._check_embeddings_in(inner, config)
            if changed := [name for name, value in _attributes(model).items() if before.get(name) != value]:
                raise self._refusal(f"it keeps something outside of its cache, in {', '.join(changed[:4])}")
        self._check_cache(cache, config)

    def _check_flow(self, flow: _Flow, logits: torch.Tensor) -> None:
        layers = flow.layers
        if any(len(entry) != 2 for entry in layers):
            raise self._refusal("it does not run every layer once")
        self.layers_give_tuples = isinstance(layers[0][1], tuple)
        outputs = [given[0] if isinstance(given, tuple) else given for _, given in layers]
        inputs = [entry for entry, _ in layers]
        for index, (before, after) in enumerate(zip(outputs, inputs[1:], strict=False), start=1):
            if not _is_same(before, after):
                raise self._refusal(f"it changes what passes from layer {index - 1} to layer {index}")
        if flow.embedded is None or not _is_same(flow.embedded, inputs[0]):
            raise self._refusal("it changes its embeddings before the first layer")
        norms = [name for name, (given, _) in flow.parts.items() if _is_same(given, outputs[-1])]
        if len(norms) != 1:
            raise self._refusal("it has more or less than one norm after the last layer")
        self.final_norm = norms[0]
        given, made = flow.head
        if given is None or made is None or not _is_same(flow.parts[norms[0]][1], given):
            raise self._refusal("it changes what its output head gets from the last norm")
        if not _is_same(made, logits):
            raise self._refusal("it changes its logits after the output head")

    def _check_attention(self, config: Any) -> None:
        attends = (*WITH_KEYS, "sliding_attention")
        if sorted(self._attended) != [layer for layer, kind in enumerate(layer_kinds(config)) if kind in attends]:
            raise self._refusal("not every layer that attends calls attention once, through the library's interface")

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        """The attention function of the trial."""
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise self._refusal(f"{type(module).__name__} calls attention without saying its layer")
        for name, argument in given.items():
            if name not in HONOURED and argument is not None and argument is not False:
                raise self._refusal(f"layer {layer} calls attention with {name}")
        if mask is not None or given.get("dropout") or given.get("is_causal") is False:
            raise self._refusal(f"layer {layer} calls attention with a mask of its own, with dropout or both ways")
        kind = layer_kinds(self._config)[layer]
        window = window_of(self._config, layer) if kind == "sliding_attention" else None
        if given.get("sliding_window") != window:
            raise self._refusal(f"layer {layer} is of kind {kind} and has a window of {given.get('sliding_window')}")
        shape = kv_shape(self._config, layer)
        if any((states.shape[1], states.shape[3]) != shape for states in (key, value)):
            raise self._refusal(f"the keys and values of layer {layer} are not {shape[0]} heads of {shape[1]}")
        self._attended.append(layer)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _check_embeddings_in(self, inner: nn.Module, config: Any) -> None:
        """Stages after the first get hidden states in place of ids, which the model must not scale."""
        seen: list[torch.Tensor] = []
        layers: Any = inner.layers

        def note(_module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            seen.append(_hidden(given, named))

        handle = layers[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            states = torch.empty((1, 2, int(config.hidden_size)), dtype=DTYPE)
            places = torch.arange(2)[None]
            inner(inputs_embeds=states, position_ids=places, cache=DynamicCache(config=config), use_cache=True)
        finally:
            handle.remove()
        if not _is_same(states, seen[0]):
            raise self._refusal("it changes hidden states that it gets in place of ids")

    def _check_cache(self, cache: Any, config: Any) -> None:
        """Compares what the library's cache keeps with the layout that the kinds give, and takes down the states of
        recurrences."""
        length = sum(CALLS)
        for layer, (kind, held) in enumerate(zip(layer_kinds(config), cache.layers, strict=True)):
            states = []
            for name in ("conv", "recurrent"):
                for index, tensor in (getattr(held, f"{name}_states", None) or {}).items():
                    if tensor is not None:
                        states.append((f"{name}_{index}", tensor.dtype, tuple(tensor.shape[1:])))
            if states:
                self.states[layer] = tuple(states)
            if (kind in RECURRENT) != bool(states):
                raise self._refusal(f"layer {layer} is of kind {kind} and has {len(states)} recurrent states")
            keys = getattr(held, "keys", None)
            if kind in WITH_KEYS and (keys is None or keys.shape[2] != length):
                raise self._refusal(f"layer {layer} does not keep the keys of every token")
            window = window_of(config, layer) if kind == "sliding_attention" else 0
            if window and (keys is None or keys.shape[2] != min(length, window - 1)):
                raise self._refusal(f"layer {layer} does not keep the keys of its window")

    def _refusal(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._name} is not supported: {reason}")

    @contextmanager
    def _functions(self) -> Iterator[None]:
        """Inside, the library finds the trial's functions for attention, masks and experts."""

        def experts(_module: nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.empty_like(hidden)

        registers: tuple[tuple[Any, Any], ...] = (
            (AttentionInterface, self.attend),
            (ALL_MASK_ATTENTION_FUNCTIONS, lambda *_, **__: None),
            (ALL_EXPERTS_FUNCTIONS, experts),
        )
        for register, function in registers:
            register.register(TRIAL, function)
        try:
            yield
        finally:
            for register, _ in registers:
                register._global_mapping.pop(TRIAL, None)

    @contextmanager
    def _attention_of(self, config: Any) -> Iterator[None]:
        config._attn_implementation_internal = TRIAL
        config._experts_implementation_internal = TRIAL
        yield


class _Flow:
    """What passes through a model: noted by hooks, anew in each call."""

    def __init__(self, inner: nn.Module, head: nn.Module) -> None:
        self._inner = inner
        self._head = head
        self.embedded: torch.Tensor | None = None
        self.layers: list[list[Any]] = []
        """Of each layer, its input and its output."""
        self.parts: dict[str, tuple[Any, Any]] = {}
        """Of each other part of the decoder, its input and its output."""
        self.head: tuple[Any, Any] = (None, None)

    @contextmanager
    def watched(self) -> Iterator[None]:
        inner: Any = self._inner
        handles = []
        try:
            embedding = inner.get_input_embeddings()
            handles.append(embedding.register_forward_hook(self._begin))
            for index, layer in enumerate(inner.layers):
                handles.append(layer.register_forward_pre_hook(self._enter(index), with_kwargs=True))
                handles.append(layer.register_forward_hook(self._leave(index)))
            for name, part in inner.named_children():
                if name != "layers" and part is not embedding:
                    handles.append(part.register_forward_hook(self._part(name)))
            handles.append(self._head.register_forward_hook(self._end))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, _module: nn.Module, _given: Any, made: torch.Tensor) -> None:
        self.embedded, self.parts = made, {}
        self.layers = [[] for _ in range(len(self._inner.layers))]  # type: ignore[arg-type]

    def _enter(self, index: int) -> Any:
        return lambda _module, given, named: self.layers[index].append(_hidden(given, named))

    def _leave(self, index: int) -> Any:
        return lambda _module, _given, made: self.layers[index].append(made)

    def _part(self, name: str) -> Any:
        def note(_module: nn.Module, given: Any, made: Any) -> None:
            self.parts[name] = (given[0] if given else None, made)

        return note

    def _end(self, _module: nn.Module, given: Any, made: Any) -> None:
        self.head = (given[0], made)


def _hidden(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return given[0] if given else named.get("hidden_states")


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are the same numbers: the same tensor, or a view of all of it."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one is other or (one.shape == other.shape and one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _attributes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """What modules hold besides parameters, submodules and hooks, and their buffers: which object each is, and how
    often a tensor was written to."""
    found: dict[str, tuple[int, int]] = {}
    for place, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for name, value in {**plain, **module._buffers}.items():
            found[f"{place}.{name}"] = (id(value), value._version if isinstance(value, torch.Tensor) else 0)
    return found
