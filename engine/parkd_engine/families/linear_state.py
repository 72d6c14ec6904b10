"""State of linear attention layers: convolution windows and recurrent states. `records` says which family has which.

Shapes are those of the library's own cache (a test compares them), without the batch dimension. Recurrent states keep
the dtype in which the model computes them: float32, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]
States = tuple[tuple[str, torch.dtype, Shape], ...]
"""(name, dtype, shape) of each state; `conv_0` and `recurrent_0` are the layer's state 0."""
LinearStates = Callable[[Any, int, torch.dtype], States]
"""(the library's configuration, layer, compute dtype) -> the states of that layer."""


def gated_delta_net(config: Any, layer: int, dtype: torch.dtype) -> States:  # noqa: ARG001
    """Qwen3-Next and Qwen3.5: one convolution over queries, keys and values, and one key-value memory per head."""
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    value_dim = config.linear_num_value_heads * config.linear_value_head_dim
    memory = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return (
        ("conv_0", dtype, (2 * key_dim + value_dim, config.linear_conv_kernel_dim)),
        ("recurrent_0", torch.float32, memory),
    )


def delta_net_and_ngrams(config: Any, layer: int, dtype: torch.dtype) -> States:
    """Qwen4-exp: a gated delta net. Layers with an n-gram embedding (numbered from 1 in the configuration) also keep
    the inputs of its dilated convolution, for all residual streams, and the last token ids."""
    states = gated_delta_net(config, layer, dtype)
    if layer + 1 not in config.ple_layer_ids:
        return states
    look_back = (config.ple_conv_kernel_size - 1) * config.ngram_size
    return (
        *states,
        ("conv_1", dtype, (config.hc_count * config.hidden_size, look_back)),
        ("conv_2", torch.int64, (config.ngram_size - 1,)),
    )


def mamba2(config: Any, layer: int, dtype: torch.dtype) -> States:  # noqa: ARG001
    """Granite 4 H, Falcon-H1: one convolution over input, B and C, and one state per head."""
    inner = config.mamba_n_heads * config.mamba_d_head
    channels = inner + 2 * config.mamba_n_groups * config.mamba_d_state
    return (
        ("conv_0", dtype, (channels, config.mamba_d_conv)),
        ("recurrent_0", torch.float32, (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state)),
    )


def short_convolution(config: Any, layer: int, dtype: torch.dtype) -> States:  # noqa: ARG001
    """LFM2: a convolution only."""
    return (("conv_0", dtype, (config.hidden_size, config.conv_L_cache)),)


def mamba2_by_heads(config: Any, layer: int, dtype: torch.dtype) -> States:  # noqa: ARG001
    """Nemotron-H: as `mamba2`, under other names."""
    channels = config.mamba_num_heads * config.mamba_head_dim + 2 * config.n_groups * config.ssm_state_size
    return (
        ("conv_0", dtype, (channels, config.conv_kernel)),
        ("recurrent_0", torch.float32, (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)),
    )
