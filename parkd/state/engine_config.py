"""How a model is laid out on its devices: what is asked for by settings, and what an engine is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 16
CPU_BATCH, CARD_BATCH = 512, 2048
"""Tokens in a prefill chunk. On CPUs a longer chunk is no faster and delays cancelling; a shorter one does not keep a
GPU busy (86k tokens of an 8B model on two H200: 4.9 s with 2048, 5.1 s with 4096)."""

MOST_SEATS = 16
AUTO_SEATS = 4
"""The most seats that are chosen automatically."""

CTX_CHECKPOINTS = 8
"""The most checkpoints of fixed state kept on the devices, unless another number is asked for."""


def batch_for(devices: Sequence[str]) -> int:
    """The default number of tokens in a prefill chunk: `CARD_BATCH` if all stages are on GPUs, else `CPU_BATCH`."""
    return CARD_BATCH if all(device.partition(":")[0] == "cuda" for device in devices) else CPU_BATCH


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configures the engine; `None` lets it choose. Raises ValueError for values that cannot work."""

    devices: tuple[str, ...] = ("cpu",)
    """One for each stage; a device may appear more than once (`("cpu", "cpu")` is two stages). Empty: to be chosen when
    the model is loaded."""
    layer_split: tuple[int, ...] | None = None
    """The first layer of each stage after the first, ascending; None balances the layers over the devices."""
    context_tokens: int | None = None
    """Rows in every arena; None takes the model's own limit or what fits, whichever is smaller."""
    batch_tokens: int | None = None
    """Tokens in a prefill chunk; chunks end at absolute multiples of it. None: by the kind of devices."""
    dtype: str | None = None
    """The compute dtype, one of `f32`, `f16` and `bf16`; None is float32 on CPU and the checkpoint's own on CUDA."""
    kv_format: str | None = None
    """How keys and values are stored, `int8` or the name of a dtype as above; None is the compute dtype."""

    weights: str | None = None
    """The kind to which weights in full precision are converted, `int4`, `int8` or `fp8`; None: as they are."""

    cpu_experts: int | None = 0
    """In how many layers the routed experts stay in main memory; None: in as few as let the rest fit the cards."""

    ctx_checkpoints: int = CTX_CHECKPOINTS
    """The most checkpoints of fixed state kept on the devices, for models that have fixed state."""
    draft_tokens: int | None = None
    """The most tokens that a draft head guesses in a step; None and 0 decode without one."""
    window_slack_tokens: int = 256
    """How many tokens a sliding window can be cut back without a checkpoint."""

    seats: int | None = 1
    """Conversations that can be live at once, at most `MOST_SEATS`; None: as many as fit beside a whole context each,
    at most `AUTO_SEATS`."""

    peer_access: bool = True
    """Whether GPUs that can may copy directly to each other; without it, hidden states pass through main memory."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a prefill chunk."""
        return self.batch_tokens or batch_for(self.devices)

    @property
    def guesses(self) -> int:
        """`draft_tokens`, or 0. Guessing is off by default: on CPUs a step with guesses costs as much as separate
        steps; on GPUs it pays only if guesses are accepted often enough, which is not known beforehand."""
        return self.draft_tokens or 0

    def __post_init__(self) -> None:
        if self.layer_split is not None and len(self.layer_split) != len(self.devices) - 1:
            raise ValueError(
                f"layer_split names {len(self.layer_split)} first layers for {len(self.devices)} devices; "
                f"name {len(self.devices) - 1}, one for each stage after the first"
            )
        if self.seats is not None and not 1 <= self.seats <= MOST_SEATS:
            raise ValueError(f"seats is {self.seats}; it must be from 1 to {MOST_SEATS}")
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens is {self.draft_tokens}; it must be from 0 to {MAX_DRAFT_TOKENS}")
        if self.cpu_experts is not None and self.cpu_experts < 0:
            raise ValueError(f"cpu_experts is {self.cpu_experts}; it must be at least 0")
        for name in ("context_tokens", "batch_tokens", "ctx_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
