"""Turns a GGUF file into a model folder that loads in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine import gguf_model
from engine.gguf import GgufFile
from engine.gguf_tokenizer import save_tokenizer
from engine.model_cache import Progress
from engine.weight_file import PlannedTensor, WeightFileWriter

CONVERSION_VERSION = 1
"""Part of the cache's key: raise it when the same file would be converted to other bytes."""
WEIGHTS_NAME = "model.safetensors"


def convert(file: GgufFile, folder: Path, dtype: torch.dtype, progress: Progress | None = None) -> None:
    """Fills `folder` with configuration, tokenizer and weights in `dtype`; memory holds one tensor at a time.

    Raises UnsupportedModel or ModelLoadError, for whatever can be known before any tensor is read.
    """
    config = gguf_model.model_config(file)
    names = gguf_model.tensor_names(file)
    save_tokenizer(file, folder)
    ends = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    planned = [PlannedTensor(name, file.tensors[source].shape) for source, name in names.items()]
    with WeightFileWriter(folder / WEIGHTS_NAME, planned, dtype) as writer:
        for done, source in enumerate(names, 1):
            writer.write(torch.from_numpy(gguf_model.model_tensor(file, source, config)))
            if progress is not None:
                progress(f"Converting {file.path.name}", done / len(names))
        writer.finish()
