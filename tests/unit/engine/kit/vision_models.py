"""Tiny models that read pictures, prompts with pictures in them, and the library's own forward as their oracle."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.records import vision_of
from parkd_engine.vision.images import ImageProcessor
from parkd_engine.vision.tower import PromptImage
from PIL import Image
from transformers import Cache, DynamicCache

from parkd.state import ImageTokens

IMAGE_ID = 95
SIDE = 32
GEMMA_TOKENS = 16
_VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
QWEN_VISION = {
    "vision_config": {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 48, "num_position_embeddings": 64},
    "image_token_id": IMAGE_ID,
    "video_token_id": 94,
    "vision_start_token_id": 93,
    "vision_end_token_id": 92,
}
QWEN3_VISION = {
    **QWEN_VISION,
    "vision_config": {
        **_VISION,
        "depth": 4,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 3],
    },
}
"""Three of the text's four layers get something of images, so that several stages do."""
GEMMA_VISION = {
    "vision_config": {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE},
    "mm_tokens_per_image": GEMMA_TOKENS,
    "image_token_index": IMAGE_ID,
    "boi_token_index": 93,
    "eoi_token_index": 92,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
_QWEN_PICTURES = ((18, 96, 32), (78, 48, 96))
PICTURES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _QWEN_PICTURES),
    "gemma3": ((18, 50, 70), (80, 33, 20)),
}
"""`model_type` -> (position, width, height) of the pictures in a prompt."""


@lru_cache
def png(seed: int, width: int, height: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def processor_of(model: Any) -> ImageProcessor | None:
    """None for a model that reads no pictures."""
    if vision_of(model.config) is None:
        return None
    library = (
        transformers.Qwen2VLImageProcessorPil(
            patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 128**2}
        )
        if model.config.model_type.startswith("qwen")
        else transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    )
    return ImageProcessor(library, model.config, ImageTokens("<image>", "<image>", IMAGE_ID))


def put_pictures(
    model: Any, ids: npt.NDArray[np.int64], seed: int = 0
) -> tuple[npt.NDArray[np.int64], tuple[PromptImage, ...]]:
    """The ids with pictures over some of them, as far as these end before the ids do; none for a model of text."""
    processor = processor_of(model)
    if processor is None:
        return ids, ()
    ids = np.where(ids == IMAGE_ID, 0, ids)
    images = []
    for number, (start, width, height) in enumerate(PICTURES[model.config.model_type]):
        data = png(seed * 10 + number, width, height)
        stop = start + processor.facts(data).tokens
        if stop < len(ids):
            ids[start:stop] = IMAGE_ID
            images.append(PromptImage(start, stop, data))
    return ids, tuple(images)


def picture_logits(
    model: Any,
    ids: npt.NDArray[np.int64],
    images: Sequence[PromptImage],
    batch_tokens: int,
    decoded: int,
    cache: Cache | None = None,
) -> list[torch.Tensor]:
    """Logits after each of the last `decoded` tokens, by the library's own forward over pixels.

    Where positions are by grid: in chunks, at the positions that the library finds for the whole prompt. Where
    pictures see themselves: the prompt at once, under the library's own masks, since it makes those for whole prompts.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    processor = processor_of(model)
    assert processor is not None
    pixels = {image.start: processor.pixels(image.data) for image in images}
    kinds = torch.from_numpy((ids == IMAGE_ID).astype(np.int64))[None]
    text, prompt = language_config(model.config), len(ids) - decoded
    by_grid = processor.family.by_grid
    chosen, text._attn_implementation = text._attn_implementation, text._attn_implementation if by_grid else "sdpa"
    try:
        with torch.inference_mode():
            whole = torch.from_numpy(ids)[None]
            positions: Any = None
            if by_grid:
                grids = torch.cat([each.grid for each in pixels.values()]) if pixels else None
                positions, _ = model.model.get_rope_index(whole, kinds, image_grid_thw=grids)
            steps = range(0, prompt, batch_tokens) if by_grid else (0,)
            ends = [*steps[1:], prompt, *range(prompt + 1, len(ids) + 1)]
            logits = []
            for start, stop in zip([*steps, *range(prompt, len(ids))], ends, strict=True):
                inside = [pixels[image.start] for image in images if start <= image.start < stop]
                arguments: dict[str, Any] = {"position_ids": positions[:, :, start:stop]} if by_grid else {}
                if inside:
                    arguments["pixel_values"] = torch.cat([each.values for each in inside])
                    if by_grid:
                        arguments["image_grid_thw"] = torch.cat([each.grid for each in inside])
                        arguments["mm_token_type_ids"] = kinds[:, start:stop]
                    else:
                        arguments["token_type_ids"] = kinds[:, start:stop]
                output = model(whole[:, start:stop], cache=cache, use_cache=True, logits_to_keep=1, **arguments)
                logits.append(output.logits[0, -1])
    finally:
        text._attn_implementation = chosen
    return logits[-decoded:]
