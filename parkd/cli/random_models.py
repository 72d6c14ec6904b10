"""The names of random models (`random:NAME`), so that a mistyped one is refused before torch is imported, which takes
tens of seconds on a busy machine."""

from __future__ import annotations

from parkd.config import nearest
from parkd.errors import ConfigError

PREFIX = "random:"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLAIN = _names(
    "gemma3-4b gpt-oss-20b nemotron-3-nano-30b-a3b qwen3-30b-a3b qwen3-8b qwen3.5-27b qwen3.5-27b-vl "
    "qwen3.5-35b-a3b qwen4-exp-small tiny-deepseek-v2 tiny-deepseek-v3 tiny-falcon-h1 tiny-gemma3 tiny-gemma3-vl "
    "tiny-gemma4 tiny-glm4-lite tiny-glm4-moe tiny-gpt-oss tiny-granite-h tiny-lfm2 tiny-llama tiny-minimax-m2 "
    "tiny-ministral3 tiny-mistral tiny-nemotron-h tiny-qwen2 tiny-qwen3 tiny-qwen3-long tiny-qwen3-moe "
    "tiny-qwen3-next tiny-qwen3.5 tiny-qwen3.5-moe tiny-qwen3.5-moe-vl tiny-qwen3.5-vl tiny-qwen4-exp "
    "tiny-qwen4-exp-vl "
)
_WITH_HEADS = _names(
    "qwen3.5-27b qwen4-exp-small tiny-deepseek-v3 tiny-glm4-lite tiny-qwen3-next tiny-qwen3.5-moe tiny-qwen3.5 "
    "tiny-qwen3.5-vl tiny-qwen4-exp tiny-qwen4-exp-vl "
)
"""Those that there are with a draft head too, and with one that agrees with its model."""
NAMES = frozenset([*_PLAIN, *(f"{name}-mtp{ending}" for name in _WITH_HEADS for ending in ("", "-echo"))])


def check_name(model: str) -> None:
    """Raises ConfigError for a random model that there is not."""
    name = model.removeprefix(PREFIX)
    if name != model and name not in NAMES:
        near = nearest(name, sorted(NAMES)) or f" (there are {', '.join(sorted(_PLAIN))})"
        raise ConfigError(f"--model {model}: there is no random model of that name{near}")
