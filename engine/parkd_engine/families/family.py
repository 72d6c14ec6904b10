"""What a family of models is: the record that `records` has of those known by name, and `parts` makes of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from parkd_engine.families.linear_state import LinearStates


class FusedPart(Enum):
    """A kind of module for which `forward.one_token` has kernels."""

    NORM = "a norm whose weight is an offset from 1"
    GATED = "a gated feed-forward"
    DELTA_NET = "a gated delta net"
    GEMMA_LAYER = "a whole layer of Gemma 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How a family reads images. Its whole model has a configuration of its own, with the text model's inside."""

    model_type: str
    """`model_type` of the whole model's configuration."""
    architecture: str
    """Class name of the whole model, as in checkpoints."""
    processor: str
    """The library's image processor class; the variant that needs only Pillow."""
    tokens: tuple[str, ...]
    """Special tokens: begin of an image, end of an image, a position of an image, and others of the family."""
    begins_only: bool
    """The chat template writes only the begin token, which becomes begin, image and end token between empty lines.
    Otherwise it writes all three."""
    sees_itself: bool
    """Attention within an image is bidirectional, so that no chunk may end inside it."""
    by_grid: bool
    """Rotary positions have three coordinates (M-RoPE). Those of an image follow its rows and columns; the text after
    it continues as if the image were as long as its longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models that the engine runs."""

    model_type: str
    """`model_type` of the text model's configuration."""
    architecture: str | None
    """Class name of the text model, as in checkpoints; None if the library has it only inside the whole model."""
    gguf_name: str | None = None
    """llama.cpp's name of the architecture, if `loading.gguf_convert` adds all entries of such files that the library's
    reader misses."""

    has_latents: bool = False
    """Whether rows are latents, from which keys and values are computed. (DeepSeek-V2, section 2.1.)"""
    linear_states: LinearStates | None = None
    """The states of a layer that has recurrent or convolution state."""
    recurrent_module: str | None = None
    """The layers' attribute that holds the module with that state; for families that come with draft heads."""

    draft_head: Mapping[str, Any] | None = None
    """If its draft heads can be used: the settings that they have besides, or other than, those of `head_settings`."""
    vision: VisionFamily | None = None
    text_of: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Whole models whose text is read and whose images are not: `model_type` of the configuration -> class name."""

    is_windowed: bool = False
    """Whether all layers have the window of `sliding_window`, if it is set, though the configuration names no kinds of
    layers."""

    final_norm: str = "norm"
    """The model's attribute that holds the norm after the last layer."""
    caps_logits: bool = False
    """Whether the library's code applies `final_logit_softcapping`, if it is set."""
    layers_give_tuples: bool = False
    """Whether layers return a tuple, of which the model uses the first element."""

    is_dense: bool = False
    """Whether `forward.dense` can run its layers: norm, attention with plain rotary positions, residual, norm,
    SiLU-gated feed-forward, residual."""
    fused_parts: Mapping[str, FusedPart] = field(default_factory=lambda: MappingProxyType({}))
    """Name of a class in the library's code of the family -> its kernels for one or a few tokens."""
    by_parts: bool = False
    """Whether a trial found it (`parts`), rather than a person. Its decoding is not recorded: what its code makes of
    numbers that only the host knows is not known."""
    recorded_chunks: str | None = None
    """Name of the layers' class, if their linear attention reads nothing back from the device and ignores the
    position, so that chunks can be recorded."""

    @property
    def head_settings(self) -> dict[str, Any]:
        """The settings that declare a draft head of one layer in a text configuration."""
        return {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"], **(self.draft_head or {})}
