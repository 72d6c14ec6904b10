"""What the configuration says of each layer: its kind, its heads, its window, its experts."""

from __future__ import annotations

from typing import Any

STATELESS = ("moe", "mlp")
"""The library's names for feed-forwards that count as layers."""


def kv_shape(config: Any, layer: int = 0) -> tuple[int, int]:
    """Number of heads of a layer's keys and values, and their size. Layers of one model may differ in both."""
    mine = _of_layer(config, layer)
    head_dim = getattr(mine, "head_dim", None) or mine.hidden_size // mine.num_attention_heads
    return (mine.num_key_value_heads or mine.num_attention_heads, head_dim)


def window_of(config: Any, layer: int) -> int:
    """The tokens that a layer with a sliding window attends to, the token itself included."""
    return int(_of_layer(config, layer).sliding_window)


def _of_layer(config: Any, layer: int) -> Any:
    """The configuration as it is for one layer; for a draft head's, the model's own."""
    if not getattr(config, "is_heterogeneous", False) or layer >= int(config.num_hidden_layers):
        return config
    return config.per_layer_config[layer]


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of every layer, `[num_hidden_layers]`, as the library builds its own cache. If the configuration names
    no kinds, layers have the window that it sets, or else full attention. A layer that attends to the keys and values
    of another has no state of its own."""
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windows = (getattr(_of_layer(config, layer), "sliding_window", None) for layer in range(count))
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    stateless = (mode == "reuse" or kind in STATELESS for kind, mode in zip(kinds, modes, strict=True))
    return tuple("dummy" if nothing else kind for kind, nothing in zip(kinds, stateless, strict=True))


def experts_of(config: Any) -> tuple[int, int]:
    """Number of experts that a layer routes tokens to, and how many it chooses for each; 0, 0 without experts."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    chosen = ("num_experts_per_tok", "top_k_experts")
    first, other = (
        next((int(n) for name in names if (n := getattr(config, name, None))), 0) for names in (counts, chosen)
    )
    return (first, other) if first and other else (0, 0)
