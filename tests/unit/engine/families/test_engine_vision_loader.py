"""Checkpoint directories of models that read pictures: weights, tokens around pictures and preprocessing come along."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, LoadConfig, LoadedModel, load_model, open_session
from parkd_engine.families.presets.shapes import PRESETS, preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import preset_processor, preset_tokenizer
from parkd_engine.plan import plan_model
from parkd_engine.vision.tower import PromptImage

from parkd.errors import ModelError
from tests.unit.engine.kit.vision_models import png

EVERY_PRESET = pytest.mark.parametrize(
    "name", [name for name in PRESETS if name.startswith("tiny") and name.endswith("-vl")]
)


def published(name: str, folder: Path) -> Path:
    """A preset as a model is published: weights, tokenizer and how images are preprocessed."""
    config = preset_config(f"random:{name}")
    random_model(config, torch.float32, torch.device("cpu")).save_pretrained(folder)
    preset_tokenizer(config).save_pretrained(folder)
    preset_processor(f"random:{name}", config).save_pretrained(folder)
    return folder


def logits(loaded: LoadedModel) -> torch.Tensor:
    assert loaded.images is not None
    data = png(3, 50, 70)
    stop = 10 + loaded.images.facts(data).tokens
    ids = np.random.default_rng(0).integers(10, 500, stop + 9)
    session = open_session(loaded.model, EngineConfig(devices=("cpu",), context_tokens=128), loaded.images)
    session.extend(ids[:-1], images=[PromptImage(10, stop, data)])
    return session.step(int(ids[-1]))


@EVERY_PRESET
def test_a_directory_gives_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    folder = published(name, tmp_path / "model")
    loaded = load_model(LoadConfig(str(folder), tmp_path / "cache"))
    preset = load_model(LoadConfig(f"random:{name}", tmp_path / "cache"))
    assert loaded.images is not None
    assert preset.images is not None
    assert loaded.images.tokens == preset.images.tokens
    assert loaded.images.facts(png(3, 50, 70)) == preset.images.facts(png(3, 50, 70))
    assert loaded.end_token_ids == preset.end_token_ids
    # Weights that lie otherwise in memory are multiplied in another order.
    torch.testing.assert_close(logits(loaded), logits(preset), atol=1e-4, rtol=0)


@EVERY_PRESET
def test_the_older_file_of_preprocessing_is_read_too(name: str, tmp_path: Path) -> None:
    folder = published(name, tmp_path / "model")
    config = preset_config(f"random:{name}")
    library = preset_processor(f"random:{name}", config)
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    (folder / "processor_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        load_model(LoadConfig(str(folder), tmp_path / "cache"))
    older = {**library.to_dict(), "image_processor_type": f"{type(library).__name__.removesuffix('Pil')}Fast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(older, default=int))
    loaded = load_model(LoadConfig(str(folder), tmp_path / "cache"))
    preset = load_model(LoadConfig(f"random:{name}", tmp_path / "cache"))
    assert loaded.images is not None
    assert preset.images is not None
    assert loaded.images.pixels(png(3, 50, 70)).values.equal(preset.images.pixels(png(3, 50, 70)).values)


@EVERY_PRESET
def test_planning_knows_the_text_of_the_model(name: str) -> None:
    plan = plan_model(f"random:{name}", EngineConfig(devices=("cpu", "cpu")))
    assert plan.context_tokens == 4096
    assert plan.stages[0].row_bytes
    assert plan.stages[0].fixed_bytes
