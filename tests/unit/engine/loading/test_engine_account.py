"""What a stage takes on its device is counted whole: compared with modules and arenas of the tests' own making."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig
from parkd_engine.account import ModelMemory
from parkd_engine.arenas.layout import build_layout
from parkd_engine.balance import choose_split
from parkd_engine.draft.stream_head import head_class
from parkd_engine.families.multimodal import language_config, language_model
from parkd_engine.families.presets import shapes
from parkd_engine.families.presets.shapes import Preset, preset_config
from parkd_engine.families.records import vision_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.loading import load_parts

GIB = 1 << 30
CARDS = ("cuda:0", "cuda:1")
BF16 = torch.bfloat16


def built(config: Any) -> tuple[Any, Any]:
    """The library's model, and its draft head if the configuration names one, without memory."""
    kind = AutoModelForCausalLM if vision_of(config) is None else AutoModelForImageTextToText
    with torch.device("meta"), no_init_weights():
        model = kind.from_config(config, dtype=BF16)
        model.tie_weights()
        has_head = bool(getattr(language_config(config), "mtp_layer_types", None))
        head = head_class(config)(model, 1).to(BF16) if has_head else None
    return model, head


def size(*modules: nn.Module | None) -> int:
    tensors = {id(p): p.nbytes for module in modules if module is not None for p in module.parameters()}
    return sum(tensors.values())


def fullest(config: Any, model: Any, head: Any, layout: EngineConfig) -> list[int]:
    """By the layer at which the last of two cards begins: the bytes of weights and state on the fuller card."""
    text, decoder, output = language_config(config), language_model(model), model.get_output_embeddings()
    layers, copies = int(text.num_hidden_layers), 1 + layout.ctx_checkpoints + layout.guesses
    others = (part for name, part in decoder._modules.items() if name not in ("layers", "embed_tokens"))
    own = {} if head is None else head._modules
    tower = 0 if vision_of(config) is None else size(model) - size(decoder, output)
    first, last = size(decoder.embed_tokens) + tower, size(output, *others)
    last += size(*(part for name, part in own.items() if name not in ("embed_tokens", "shared_head")))
    weights = [size(layer) for layer in decoder.layers]
    sizes = []
    for cut in range(1, layers):
        stages = build_layout(config, [(0, cut), (cut, layers)], BF16, BF16)
        one, other = (stage.row_bytes * (layout.context_tokens or 0) + stage.fixed_bytes * copies for stage in stages)
        sizes.append(max(first + sum(weights[:cut]) + one, last + sum(weights[cut:]) + other))
    return sizes


@pytest.mark.parametrize(
    ("name", "guesses", "context_tokens"),
    [("qwen3.5-27b-mtp", 4, 131_072), ("qwen3.5-27b-vl", 0, 131_072), ("qwen3-8b", 0, 40_960)],
)
def test_the_split_leaves_the_fullest_card_as_empty_as_can_be(name: str, guesses: int, context_tokens: int) -> None:
    """With its draft head, 27B at 131,072 tokens takes 33.01 GB of the fuller card if the last begins at layer 33, and
    33.58 GB if it begins at layer 32."""
    config = preset_config(f"random:{name}")
    layout = EngineConfig(CARDS, context_tokens=context_tokens, draft_tokens=guesses)
    (_, cut), _ = choose_split(config, BF16, layout, lambda _device: 80 * GIB)
    sizes = fullest(config, *built(config), layout)
    assert cut == 1 + sizes.index(min(sizes))
    if guesses:
        assert (cut, round(sizes[31] / 1e9, 2), round(sizes[32] / 1e9, 2)) == (33, 33.58, 33.01)


NAMES = (
    *("tiny-qwen3", "tiny-gemma3", "tiny-qwen3-next-mtp", "tiny-qwen3.5-mtp", "tiny-qwen4-exp-mtp", "tiny-lfm2"),
    *("tiny-granite-h", "tiny-falcon-h1", "tiny-deepseek-v3-mtp", "tiny-qwen3.5-vl-mtp", "tiny-gemma3-vl"),
    *("tiny-gpt-oss", "tiny-gemma4", "tiny-nemotron-h", "tiny-qwen3.5-moe-mtp", "tiny-qwen3-vl-moe"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=",".join)
def test_weights_and_state_are_those_of_the_loaded_stages(name: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    layout = EngineConfig(devices, context_tokens=1024, draft_tokens=2 if name.endswith("-mtp") else 0)
    parts = load_parts(ModelConfig(f"random:{name}", tmp_path, layout=layout), None, lambda _: 8 * GIB)
    session, accounts = parts.session, parts.info.memory
    modules = [module for stage in session.stages for module in (stage.inner, stage.head, stage.mixer)]
    modules += [getattr(session.vision, "module", None), getattr(session.draft, "model", None)]
    tensors = {p.data_ptr(): p.nbytes for module in modules if module is not None for p in module.parameters()}
    named = ("weights", "vision tower", "draft head")
    assert sum(lines.get(part, 0) for lines in accounts for part in named) == sum(tensors.values())
    assert parts.info.weights_bytes == sum(tensors.values())
    for lines, arena, cache in zip(accounts, session.arenas, session.caches, strict=True):
        live = (arena.rows, arena.fixed, *(b for pair in arena.windows.values() for b in pair))
        live += tuple(arena.index_blocks.values())
        held = sum(lines.get(part, 0) for part in ("rows", "fixed state", "windows", "index"))
        assert held == sum(tensor.nbytes for tensor in live)
        assert lines.get("states behind guesses", 0) == cache.history._kept.nbytes
        assert lines.get("checkpoints", 0) == 8 * arena.fixed.nbytes


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-qwen3.5-mtp", "tiny-qwen4-exp"])
def test_each_seat_takes_fixed_state_of_its_own_and_all_share_rows(name: str, tmp_path: Path) -> None:
    guesses = 2 if name.endswith("-mtp") else 0
    layout = EngineConfig(("cpu", "cpu"), context_tokens=1000, draft_tokens=guesses, seats=3)
    parts = load_parts(ModelConfig(f"random:{name}", tmp_path, layout=layout), None, lambda _: 8 * GIB)
    assert (len(parts.sessions), parts.info.live_conversations) == (3, 3)
    assert parts.info.row_tokens == 3 * 1024, "a context for each, in whole ranges of 256"
    alone = replace(layout, seats=1)
    other = load_parts(ModelConfig(f"random:{name}", tmp_path, layout=alone), None, lambda _: 8 * GIB)
    assert parts.info.build != other.info.build, "what a canary found of one seat is not said of three"
    for index, lines in enumerate(parts.info.memory):
        arenas = [session.arenas[index] for session in parts.sessions]
        caches = [session.caches[index] for session in parts.sessions]
        assert lines["rows"] == arenas[0].all_rows.nbytes == parts.info.row_tokens * arenas[0].layout.row_bytes
        assert all(arena.all_rows is arenas[0].all_rows for arena in arenas)
        assert lines.get("index", 0) == sum(blocks.nbytes for blocks in arenas[0].all_index_blocks.values())
        assert lines.get("fixed state", 0) == sum(arena.fixed.nbytes for arena in arenas)
        windows = (buffer for arena in arenas for pair in arena.windows.values() for buffer in pair)
        assert lines.get("windows", 0) == sum(buffer.nbytes for buffer in windows)
        assert lines.get("states behind guesses", 0) == sum(cache.history._kept.nbytes for cache in caches)
        assert lines.get("checkpoints", 0) == 8 * sum(arena.fixed.nbytes for arena in arenas)


def test_tied_weights_count_once_on_one_device_and_twice_on_two() -> None:
    config = preset_config("random:tiny-qwen3")
    config.tie_word_embeddings = True
    model, _ = built(config)
    embedding = model.get_input_embeddings().weight.nbytes
    sums = {}
    for devices in (("cuda:0",), ("cuda:0", "cuda:0"), CARDS):
        ranges = ((0, 4),) if len(devices) == 1 else ((0, 2), (2, 4))
        stages = ModelMemory(config, BF16, EngineConfig(devices)).stages(ranges)
        sums[devices] = sum(stage.lines(0)["weights"] for stage in stages)
    assert sums["cuda:0",] == sums["cuda:0", "cuda:0"] == size(model)
    assert sums[CARDS] == size(model) + embedding


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that live at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            storage = made.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in given:
                self._live[storage._cdata] = storage.nbytes()
                self.most = max(self.most, sum(self._live.values()))
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        return out


WIDE = {
    "tiny-qwen3": {"intermediate_size": 2048},
    "tiny-gemma3": {"sliding_window": 256},
    "tiny-qwen3.5-mtp": {"linear_num_value_heads": 32},
    "tiny-qwen3-next": {"moe_intermediate_size": 512},
    "tiny-lfm2": {"hidden_size": 256},
    "tiny-granite-h": {"mamba_d_state": 64},
    "tiny-falcon-h1": {"mamba_chunk_size": 128},
    "tiny-gpt-oss": {"sliding_window": 256},
    "tiny-gemma4": {"global_head_dim": 64},
    "tiny-nemotron-h": {"ssm_state_size": 64},
    "tiny-deepseek-v3": {"num_attention_heads": 16, "num_key_value_heads": 16},
}


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize("wide", [False, True], ids=["tiny", "wide"])
@pytest.mark.parametrize("name", list(WIDE))
def test_the_workspace_is_what_reading_a_chunk_takes(
    name: str, wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library's own forward pass, at the end of a short and of a long prompt."""
    shape = shapes.PRESETS[name]
    changed = Preset(shape.model_type, {**shape.settings, **(WIDE[name] if wide else {})})
    monkeypatch.setattr(shapes, "PRESETS", {**shapes.PRESETS, name: changed})
    for context in (512, 3072):
        layout = EngineConfig(context_tokens=context, draft_tokens=2 if name.endswith("-mtp") else 0)
        parts = load_parts(ModelConfig(f"random:{name}", tmp_path, layout=layout), None, lambda _: 8 * GIB)
        parts.session.extend(np.zeros(context - 512, dtype=np.int64))
        with LiveBytes() as counted:
            parts.session.extend(np.ones(512, dtype=np.int64))
        (lines,) = parts.info.memory
        assert counted.most <= lines["workspace"] <= 2 * counted.most + (1 << 20)
