"""The attention function that transformers models call instead of their own.

It takes keys and values as views of arena rows, strided by whole rows, and keeps transformers from making a mask. The
queries are always the last `q` positions of the keys.

    CPU     256 queries at a time over the keys they see, with one [256, kv] bias; no larger mask exists
    images  a bias that lets the tokens of an image see each other; an image lies wholly in one chunk
    window  the blocked path with a bias on every device, since no kernel here supports windows; used only once a key
            falls out of the window. On GPUs a chunk takes larger blocks, since launches take longer than computing,
            and KV heads are repeated, since the kernel that takes a bias does not support grouped queries
    index   sparse attention: the same with the keys that the index selected; a small selection is gathered instead
    CUDA    the lower-right causal bias, which keeps the flash kernel. Never cuDNN's kernel: it builds a new plan for
            every length (2.3 ms for each layer and token; the kernel itself takes 0.07 ms), and over gathered keys its
            results were not reproducible. Chunks go through a faster kernel where there is one
            (`kernels.prompt_attention`)
    latents few tokens attend to latents instead of keys and values (`forward.latents`)
    sinks   a score for each head that takes part in the softmax and has no value: attention without it, scaled by what
            share of the weights the keys have. The kernels say how large their sum is (logsumexp)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from parkd.errors import UnsupportedModel
from parkd_engine.arenas.kv_format import KeptStates, QuantisedStates, tokens_of
from parkd_engine.arenas.placed import PlacedStates
from parkd_engine.families.layer_state import INDEXED
from parkd_engine.forward.indexer import CausalOrder, KeySelection
from parkd_engine.forward.latents import MOST_TOKENS, LatentStates
from parkd_engine.kernels.prompt_attention import is_worth_it, kernel_for

ATTENTION_NAME = "parkd"
QUERY_BLOCK = 256
"""Queries in each block that needs an explicit bias."""
WINDOW_QUERIES = 1024
"""The same for a sliding window on a GPU."""

BIAS_ALIGNMENT = 16
"""Elements: rows of a bias start at a multiple of it, as the kernel on GPUs requires."""

CUDA_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

Spans = Sequence[tuple[int, int]]
"""Ranges `[start, stop)` of queries."""
FEW = 8
"""Selected keys are gathered if there are more than this many times as many keys: less work than masking the rest."""
GATHERED = 1 << 22
"""Elements gathered at once: 16 MiB in float32."""

Hidden = int | KeySelection | None
"""What hides earlier keys: a window of this many tokens, or an index's selection; None if nothing does."""

HARMLESS_ARGUMENTS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments that models pass through; they do not change what attention computes."""


def register_attention() -> None:
    """Registers `attn_implementation="parkd"` with transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, arena_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, no_mask)


def no_mask(*, config: Any, attention_mask: torch.Tensor | None = None, **_: Any) -> CausalOrder | None:
    """The mask function: makes no mask. Raises UnsupportedModel for padding, which would need one.

    Models with an index of keys always add their own mask to this one, so they get a placeholder.
    """
    if attention_mask is not None:
        raise UnsupportedModel("attention with a padding mask is not supported")
    return CausalOrder() if INDEXED in (getattr(config, "layer_types", None) or ()) else None


def arena_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: KeptStates | PlacedStates | LatentStates,
    value: KeptStates | PlacedStates | LatentStates,
    attention_mask: torch.Tensor | KeySelection | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    image_spans: Spans = (),
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `[1, heads, q, dim]` queries over `[1, kv_heads, kv, dim]` keys and values (tensors,
    `QuantisedStates`, or what they are computed from).

    With `sliding_window`, a query sees at most that many keys, including its own; with a `KeySelection`, the selected
    ones. A query in one of `image_spans`, ranges of the queries, also sees all keys of its range. `s_aux`, `[heads]`,
    are the heads' sinks.
    Returns `[1, q, heads, dim]` and None, as transformers models expect. Raises UnsupportedModel for an unsupported
    argument that would change the result.
    """
    for name, given in arguments.items():
        if given is not None and given is not False and name not in HARMLESS_ARGUMENTS:
            raise UnsupportedModel(f"{type(module).__name__} calls attention with {name}, which is not supported")
    selection = attention_mask if isinstance(attention_mask, KeySelection) else None
    if attention_mask is not None and selection is None:
        raise UnsupportedModel(f"{type(module).__name__} calls attention with a mask of its own: not supported")
    if dropout or is_causal is False:
        raise UnsupportedModel(f"{type(module).__name__} calls attention with dropout or without causality")
    if isinstance(key, LatentStates):
        if query.shape[2] <= MOST_TOKENS:
            return key.attend(query, scaling).transpose(1, 2), None
        key, value = key.expanded()
    assert not isinstance(value, LatentStates), "latents are passed in place of both"
    if isinstance(key, PlacedStates):
        assert isinstance(value, PlacedStates), "keys and values are kept in one format"
        return key.attend(query, value, scaling, s_aux).transpose(1, 2), None
    assert not isinstance(value, PlacedStates), "keys and values are kept in one format"
    if s_aux is not None and selection is not None:
        raise UnsupportedModel(f"{type(module).__name__} calls attention with sinks and an index: not supported")
    with sdpa_kernel(list(CUDA_KERNELS)) if query.device.type == "cuda" else nullcontext():
        output = _output(query, key, value, scaling, sliding_window, selection, image_spans, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _output(
    query: torch.Tensor,
    key: KeptStates,
    value: KeptStates,
    scaling: float | None,
    sliding_window: int | None,
    selection: KeySelection | None,
    image_spans: Spans,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns `[1, heads, q, dim]`."""
    # A window at least as long as the keys hides nothing.
    window = sliding_window if sliding_window is not None and key.shape[2] > sliding_window else None
    hidden = window if selection is None or selection.chosen is None else selection
    if isinstance(hidden, KeySelection) and (query.shape[2] == 1 or key.shape[2] > FEW * hidden.width):
        return _gathered(query, key, value, scaling, hidden)
    if isinstance(key, QuantisedStates):
        assert isinstance(value, QuantisedStates), "keys and values are kept in one format"
        return _attend_quantised(query, key, value, scaling, hidden, image_spans, sinks)
    assert isinstance(value, torch.Tensor), "keys and values are kept in one format"
    return _attend(query, key, value, scaling, hidden, image_spans, sinks)


def _attend_quantised(
    query: torch.Tensor,
    key: QuantisedStates,
    value: QuantisedStates,
    scaling: float | None,
    hidden: Hidden,
    spans: Spans,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends one KV head at a time on CPU, so that only one head's dequantised keys and values exist at once."""
    if query.device.type == "cuda":
        return _attend(query, key.numbers(query.dtype), value.numbers(query.dtype), scaling, hidden, spans, sinks)
    heads = key.shape[1]
    queries = query.chunk(heads, dim=1)
    its_sinks: Sequence[torch.Tensor | None] = [None] * heads if sinks is None else sinks.chunk(heads)
    outputs = [
        _attend(each, key.head(head, query.dtype), value.head(head, query.dtype), scaling, hidden, spans, sunk)
        for head, (each, sunk) in enumerate(zip(queries, its_sinks, strict=True))
    ]
    return torch.cat(outputs, dim=1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    hidden: Hidden,
    spans: Spans,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if sinks is not None and hidden is None and not spans and _takes_flash(query):
        return _beside_sinks(*_flash(query, key, value, scaling), sinks)
    if sinks is not None:
        return _blocked(query, key, value, scaling, grouped, hidden, spans, sinks)
    if query.device.type == "cuda" and hidden is None and not spans:
        if (output := of_chunk(query, key, value, scaling)) is not None:
            return output.transpose(0, 1)[None]
        bias = causal_lower_right(query.shape[2], key.shape[2]) if query.shape[2] > 1 else None
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=grouped)
    if query.shape[2] == 1 and hidden is None:
        return scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=grouped)
    return _blocked(query, key, value, scaling, grouped, hidden, spans)


def of_chunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor | None:
    """Causal attention of a chunk of several tokens, as for `arena_attention`, through the kernel for prompts; returns
    `[q, heads, dim]`. None if torch's kernel is to be used."""
    heads, tokens, dim = query.shape[1:]
    if not is_worth_it(tokens, heads) or value.shape[3] != dim or key.dtype != query.dtype:
        return None
    kernel = kernel_for(query.device, query.dtype, dim)
    if kernel is None:
        return None
    return kernel(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)


def _takes_flash(query: torch.Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention on a GPU, the queries being the last of the keys, and the logsumexp of the scores, float32
    `[1, heads, q]`."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=scaling
    )
    return found[0], found[1]


def _with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under a `bias` `[q, kv]`, and the logsumexp of the scores, float32 `[1, heads, q]`."""
    if query.device.type != "cuda":
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=scaling
        )
        return output, sums
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # The kernel that takes a bias does not support grouped queries.
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    room = -bias.shape[1] % BIAS_ALIGNMENT
    bias = torch.nn.functional.pad(bias, (0, room))[:, : bias.shape[1]]
    output, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias.expand(1, query.shape[1], -1, -1), compute_log_sumexp=True, scale=scaling
    )
    return output, sums[..., : query.shape[2]]


def _beside_sinks(output: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """`output` is `[1, heads, q, dim]` of attention without sinks, `sums` the logsumexp of its scores. The part of the
    weights that is the keys' is exp(sum) / (exp(sum) + exp(sink))."""
    share = torch.sigmoid(sums.float() - sinks.float()[None, :, None])
    return (output * share.unsqueeze(-1)).to(output.dtype)


def _piece(query: torch.Tensor, key: KeptStates, hidden: Hidden) -> tuple[int, int]:
    """The queries in each block, and how often each KV head is repeated."""
    if isinstance(hidden, int) and query.device.type == "cuda" and query.shape[2] > 1:
        return WINDOW_QUERIES, query.shape[1] // key.shape[1]
    return QUERY_BLOCK, 1


def _blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    grouped: bool,
    hidden: Hidden,
    spans: Spans,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends in blocks of `QUERY_BLOCK` or `WINDOW_QUERIES` queries; returns `[1, heads, q, dim]`."""
    past = key.shape[2] - query.shape[2]
    step, repeats = _piece(query, key, hidden)
    outputs = []
    for start in range(0, query.shape[2], step):
        block = query[:, :, start : start + step]
        end = start + block.shape[2]
        ahead = [span for span in spans if span[0] < end and start < span[1]]
        stop = past + max([end, *(span[1] for span in ahead)])
        first = max(0, past + start - hidden + 1) if isinstance(hidden, int) else 0
        bias = lower_right_bias(block.shape[2], past + end - first, query.dtype, query.device)
        if ahead:
            bias = torch.nn.functional.pad(bias, (0, stop - past - end), value=-torch.inf)
            for head, tail in ahead:
                seen_from = max(past + head - first, 0)  # A window may begin inside the image.
                bias[max(head, start) - start : tail - start, seen_from : past + tail - first] = 0
        if isinstance(hidden, int):
            gone = torch.ones_like(bias, dtype=torch.bool).tril_(past + start - first - hidden)
            bias.masked_fill_(gone, -torch.inf)
        elif hidden is not None:
            bias.masked_fill_(~hidden.mask(start, end), -torch.inf)
        keys, values = (states[:, :, first:stop] for states in (key, value))
        if sinks is not None:
            outputs.append(_beside_sinks(*_with_bias(block, keys, values, bias, scaling), sinks))
            continue
        if repeats > 1:
            keys, values = (states.repeat_interleave(repeats, dim=1) for states in (keys, values))
        outputs.append(
            scaled_dot_product_attention(
                block, keys, values, attn_mask=bias, scale=scaling, enable_gqa=grouped and repeats == 1
            )
        )
    return torch.cat(outputs, dim=2)


def _gathered(
    query: torch.Tensor, key: KeptStates, value: KeptStates, scaling: float | None, chosen: KeySelection
) -> torch.Tensor:
    """Attends each query to its selected keys, gathering about `GATHERED` elements at a time; returns
    `[1, heads, q, dim]`."""
    heads, each = key.shape[1], key.shape[1] * (key.shape[3] + value.shape[3]) * chosen.width
    step = max(1, GATHERED // each)
    outputs = []
    for start in range(0, query.shape[2], step):
        block = query[0, :, start : start + step].transpose(0, 1).unsqueeze(2)
        places, seen = chosen.places(start, start + len(block))
        keys, values = (tokens_of(states, places, query.dtype) for states in (key, value))
        output = scaled_dot_product_attention(
            block, keys, values, attn_mask=seen[:, None, None], scale=scaling, enable_gqa=heads != query.shape[1]
        )
        outputs.append(output[:, :, 0])
    return torch.cat(outputs).transpose(0, 1).unsqueeze(0)


def lower_right_bias(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[queries, keys]` of 0 and -inf: query `i` sees the keys `0` to `keys - queries + i`, inclusive."""
    bias = torch.zeros((queries, keys), dtype=dtype, device=device)
    bias[:, keys - queries :].fill_(float("-inf")).triu_(1)
    return bias
