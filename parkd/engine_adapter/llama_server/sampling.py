"""Sampling and constraints in the words of `/completion`.

    penalties -> temperature -> top_k -> top_p -> min_p       in the order of parkd's own engine

Every field is sent, so that what the server was started with does not matter. Penalties count prompt and answer, as the
server's always do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.errors import EngineFailure, InvalidRequest
from parkd.types import SamplingParams, ToolChoiceMode, TurnRequest

SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
SEED_MODULUS = 0xFFFFFFFF
"""Seeds of a llama-server have 32 bits, and this one stands for none."""


def sampling_fields(sampling: SamplingParams, context_tokens: int, fresh_seed: int) -> dict[str, Any]:
    seed = fresh_seed if sampling.seed is None else sampling.seed
    return {
        "samplers": list(SAMPLERS),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": seed % SEED_MODULUS,
        "logit_bias": [[token_id, bias] for token_id, bias in sampling.logit_bias.items()],
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "ignore_eos": False,
        "n_probs": 0,
    }


@dataclass(frozen=True)
class UpstreamConstraint:
    """A `TokenMask` that the server applies itself."""

    fields: Mapping[str, Any]
    """Of the completion's body."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        raise EngineFailure("What this answer must obey is known to the llama-server alone.")

    def accept(self, token_id: int) -> None:
        """The server does."""


def constraint(request: TurnRequest, *, thinks: bool) -> UpstreamConstraint | None:
    """What the server must hold an answer to; None where it is free.

    `thinks`: the answer begins, or may begin, with thinking. The server's grammars hold from the first token, so
    they cannot be had with that, nor for a call in the model's own way of writing calls.
    Raises InvalidRequest.
    """
    mode = request.tool_choice.mode
    if mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
        raise InvalidRequest(
            "`tool_choice` forces a call, which parkd cannot make a llama-server hold to. Use `auto`.",
            param="tool_choice",
        )
    if request.response_schema is None:
        return None
    if request.tools and mode is ToolChoiceMode.AUTO:
        raise InvalidRequest(
            "A response format and tools together cannot be enforced on a llama-server. Send one of them, or "
            "`tool_choice: none`.",
            param="response_format",
        )
    if thinks:
        raise InvalidRequest(
            "A response format cannot be enforced on a llama-server while the model thinks. Turn its thinking off "
            "(`reasoning_effort: none`).",
            param="response_format",
        )
    return UpstreamConstraint({"json_schema": request.response_schema})
