"""Draft heads in checkpoints: found by their weights' names, loaded as the family keeps them, left out when asked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, LoadConfig, LoadedModel, load_model, open_session
from parkd_engine.draft.stream_head import StreamHead
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.presets.heads import random_head
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import preset_processor, preset_tokenizer, tiny_tokenizer
from parkd_engine.loading.draft_loading import INDEX_FILE, drop_head
from parkd_engine.loading.fingerprint import fingerprint
from parkd_engine.plan import plan_model
from safetensors.torch import load_file, save_file

from parkd.errors import ModelError

OUTER = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""The library's names of a head's own parts -> those in Qwen's checkpoints."""


def head_weights(head: Any, kind: str, layers: int) -> dict[str, torch.Tensor]:
    """As checkpoints name them. Qwen's: the decoder layer under `mtp.layers.0`, the rest beside it. Others: all as one
    layer more than the model's, with the embedding and the output once more."""
    if isinstance(head, StreamHead):
        own = [(name, part) for name, part in head.named_children() if name not in ("embed_tokens", "shared_head")]
        return {f"mtp.{name}.{rest}": each for name, part in own for rest, each in part.state_dict().items()}
    is_qwen = kind.startswith("qwen")
    layer = "mtp.layers.0" if is_qwen else f"model.layers.{layers}"
    named = {}
    for name, weight in head.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        if rest == "mlp.experts.gate_up_proj":
            for index, both in enumerate(weight):
                gate, up = both.chunk(2)
                named[f"{layer}.mlp.experts.{index}.gate_proj.weight"] = gate.contiguous()
                named[f"{layer}.mlp.experts.{index}.up_proj.weight"] = up.contiguous()
        elif rest == "mlp.experts.down_proj":
            for index, down in enumerate(weight):
                named[f"{layer}.mlp.experts.{index}.down_proj.weight"] = down.contiguous()
        elif part == "mtp_block":
            named[f"{layer}.{rest}"] = weight
        elif is_qwen:
            named[f"mtp.{OUTER[part]}.{rest}"] = weight
        else:
            named[f"{layer}.{'shared_head.norm' if part == 'post_norm' else part}.{rest}"] = weight
    if not is_qwen:
        named[f"{layer}.embed_tokens.weight"] = head.embed_tokens.weight.clone()
        named[f"{layer}.shared_head.head.weight"] = head.shared_head.weight.clone()
    return named


def save_checkpoint(name: str, path: Path, *, sharded: bool = False) -> Any:
    """A folder like a published one, whose configuration says nothing of the head. Returns the head."""
    config = preset_config(f"random:{name}")
    model = random_model(config, torch.float32, torch.device("cpu"))
    head = random_head(model, name)
    text = language_config(model.config)
    drop_head(model.config)
    model.save_pretrained(path)
    preset_tokenizer(config).save_pretrained(path)
    if (processor := preset_processor(f"random:{name}", config)) is not None:
        processor.save_pretrained(path)
    weights, extra = load_file(path / "model.safetensors"), head_weights(head, text.model_type, text.num_hidden_layers)
    if sharded:
        shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        (path / "model.safetensors").rename(path / shards[0])
        save_file(extra, path / shards[1], {"format": "pt"})
        places = dict.fromkeys(weights, shards[0]) | dict.fromkeys(extra, shards[1])
        (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        save_file(weights | extra, path / "model.safetensors", {"format": "pt"})
    return head


def load(path: Path | str, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(path), Path(str(path)).parent / "cache", **settings))


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("tiny-qwen3.5-mtp", False),
        ("tiny-qwen3-next-mtp", True),
        ("tiny-qwen3.5-vl-mtp", False),
        ("tiny-qwen4-exp-mtp", True),
        ("tiny-qwen4-exp-vl-mtp", False),
        ("tiny-deepseek-v3-mtp", False),
        ("tiny-glm4-lite-mtp", True),
    ],
)
def test_a_head_is_loaded_with_its_model(name: str, sharded: bool, tmp_path: Path) -> None:
    head = save_checkpoint(name, tmp_path / "model", sharded=sharded)
    loaded = load(tmp_path / "model")
    assert (loaded.images is not None) == ("-vl" in name)
    expected, found = (dict(each.named_parameters()) for each in (head, loaded.draft_model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    guesses = []
    for draft in (head, loaded.draft_model):
        config = EngineConfig(devices=("cpu", "cpu"), context_tokens=64, draft_tokens=2)
        session = open_session(loaded.model, config, draft_model=draft)
        session.extend(np.arange(20, 50))
        guesses.append(session.guess(7, 2, lambda logits: int(logits.argmax())))
    assert guesses[0] == guesses[1]
    assert len(guesses[0]) == 2


@pytest.mark.parametrize("name", ["tiny-qwen3.5-mtp", "tiny-qwen3.5-vl-mtp", "tiny-glm4-lite-mtp"])
def test_a_head_is_left_out_when_asked_and_part_of_what_state_depends_on(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "model")
    with_head, without = load(tmp_path / "model"), load(tmp_path / "model", draft=False)
    assert without.draft_model is None
    prints = [
        fingerprint(each.weights_digest, each.config.to_dict(), each.dtype, torch.float32)
        for each in (with_head, without)
    ]
    assert prints[0] != prints[1]
    sessions = [
        open_session(each.model, EngineConfig(devices=("cpu", "cpu"), context_tokens=64), draft_model=each.draft_model)
        for each in (with_head, without)
    ]
    assert sessions[0].layout.digest != sessions[1].layout.digest
    for draft_tokens, session in ((2, sessions[0]), (None, sessions[1])):
        planned = plan_model(str(tmp_path / "model"), EngineConfig(devices=("cpu", "cpu"), draft_tokens=draft_tokens))
        assert planned.stages == tuple(arena.layout for arena in session.arenas)


def test_checkpoints_without_a_head_have_none(tmp_path: Path) -> None:
    config = preset_config("random:tiny-qwen3.5")
    random_model(config, torch.float32, torch.device("cpu")).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.draft_model is None
    assert not hasattr(loaded.config, "num_mtp_layers")


def test_a_head_of_another_make_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint("tiny-qwen3.5-mtp", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"mtp.embed_tokens.weight": torch.ones(512, 64)}, file, {"format": "pt"})
    with caplog.at_level(logging.WARNING, "parkd.engine"):
        assert load(tmp_path / "model").draft_model is None
    assert "embedding of its own" in caplog.text


@pytest.mark.parametrize(
    ("name", "layer"), [("tiny-qwen3.5-mtp", "mtp.layers.1"), ("tiny-deepseek-v3-mtp", "model.layers.5")]
)
def test_of_a_head_of_several_layers_the_first_is_used(
    name: str, layer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = save_checkpoint(name, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {f"{layer}.input_layernorm.weight": torch.ones(64)}, file, {"format": "pt"})
    with caplog.at_level(logging.INFO, "parkd.engine"):
        loaded = load(tmp_path / "model")
    assert "of the 2 layers of the draft head" in caplog.text
    found = dict(loaded.draft_model.layers.named_parameters())
    assert all(torch.equal(found[key], each) for key, each in head.layers.named_parameters())
    assert len(loaded.draft_model.layers) == loaded.config.num_mtp_layers == 1


def test_a_head_with_weights_missing_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_checkpoint("tiny-qwen3.5-mtp", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["mtp.fc.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match="--draft-tokens 0"):
        load(tmp_path / "model")
    assert load(tmp_path / "model", draft=False).draft_model is None


@pytest.mark.parametrize(
    "name",
    [
        *("tiny-qwen3.5-mtp", "tiny-qwen3.5-mtp-echo", "tiny-qwen3-next-mtp", "tiny-qwen3.5-vl-mtp"),
        *("tiny-qwen4-exp-mtp-echo", "tiny-deepseek-v3-mtp"),
    ],
)
def test_random_models_have_seeded_heads(name: str, tmp_path: Path) -> None:
    first, second = (load_model(LoadConfig(f"random:{name}", tmp_path)) for _ in range(2))
    for left, right in zip(first.draft_model.parameters(), second.draft_model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert load_model(LoadConfig(f"random:{name}", tmp_path, draft=False)).draft_model is None


def test_the_real_shape_counts_its_head() -> None:
    """One layer's keys and values more a token, and one hidden state in all, of four streams with an indexer's key."""
    for name, row_bytes, fixed_bytes in (
        ("qwen3.5-27b", 2 * 4 * 256 * 4, 5120 * 4),
        ("qwen4-exp-small", (2 * 2 * 256 + 128) * 4, 4 * 1024 * 4),
    ):
        guessing = EngineConfig(draft_tokens=2)
        head, plain = (plan_model(f"random:{name}{ending}", guessing).stages[0] for ending in ("-mtp", ""))
        assert head.row_bytes - plain.row_bytes == row_bytes
        assert head.fixed_bytes - plain.fixed_bytes == fixed_bytes
        assert plan_model(f"random:{name}-mtp", EngineConfig()).stages[0].digest == plain.digest
