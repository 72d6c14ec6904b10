"""How much a model should think: one meaning for the many fields that clients use for it, in every dialect.

Fields from other dialects are read leniently: if a value has an unexpected type, it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parkd.errors import InvalidRequest
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.nested import text_at
from parkd.types import ReasoningParams

BUDGET_NAMES = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")
"""Names in Qwen's API, vLLM and llama-server."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Those of all vendors. A template with others takes them in `chat_template_kwargs`."""
ENABLED_TYPES = {"enabled": True, "adaptive": True, "auto": None, "disabled": False}


def reasoning_of(body: Mapping[str, Any], effort: str | None) -> ReasoningParams:
    """`effort` is the value of the dialect's own field. Raises InvalidRequest if a budget is not a whole number."""
    thinking, reasoning, kwargs = (_mapping(body, name) for name in ("thinking", "reasoning", "chat_template_kwargs"))
    effort = effort or text_at(reasoning, "effort", "reasoning") or None
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(f"The reasoning effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
    budget = fields.whole(thinking, "budget_tokens", 0, fields.MAX_TOKENS)
    if budget is None:
        budget = fields.whole(reasoning, "max_tokens", 0, fields.MAX_TOKENS)
    for name in BUDGET_NAMES:
        if budget is None and body.get(name) != -1:  # llama-server's value for "no limit"
            budget = fields.whole(body, name, 0, fields.MAX_TOKENS)
    said = (
        kwargs.get("enable_thinking"),
        body.get("enable_thinking"),
        reasoning.get("enabled"),
        body.get("thinking"),
        ENABLED_TYPES.get(str(thinking.get("type"))),
        False if effort == "none" or budget == 0 else None,
    )
    return ReasoningParams(next((word for word in said if isinstance(word, bool)), None), effort, budget)


def template_words(body: Mapping[str, Any], reasoning: ReasoningParams) -> Mapping[str, Any]:
    """Variables for the chat template. The client's own `chat_template_kwargs` take precedence."""
    words: dict[str, Any] = {}
    if reasoning.enabled is not None:
        words["enable_thinking"] = reasoning.enabled
    if reasoning.effort is not None:
        words["reasoning_effort"] = reasoning.effort
    if reasoning.budget_tokens is not None:
        words["thinking_budget"] = reasoning.budget_tokens
    return {**words, **fields.obj(body, "chat_template_kwargs")}


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, dict) else {}
