"""Reads and checks top-level fields of a body, for all dialects. Every function raises InvalidRequest with the field.

A field that is absent or null takes its default; unknown fields are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parkd.errors import InvalidRequest
from parkd.types import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGIT_BIASES = 1024
MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
LEAST_TOP_P = 1e-6
"""Used in place of 0, which means: only the most likely token."""
REPETITION_PENALTIES = (0.01, 10.0)
"""Logits are divided by it, so a much smaller value would make them infinite."""
RANDOM_SEED = -1
"""llama-server's value for a random seed."""
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
TOKEN_ID_DIGITS = 9
MAX_TOP_LOGPROBS = 20
MAX_ANSWERS = 8
MAX_STEERING_VECTORS = 64
MAX_ADAPTERS = 64
MAX_STEERING_SCALE = 1000.0
"""A larger scale is more likely a typing error than intended."""

Body = Mapping[str, Any]


def number(body: Body, name: str, low: float, high: float) -> float | None:
    """A number in [low, high]."""
    value = body.get(name)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise InvalidRequest(f"`{name}` must be a number from {low:g} to {high:g}.", param=name)
    return float(value)


def whole(body: Body, name: str, low: int, high: int) -> int | None:
    """A whole number in [low, high]; `5.0` counts as one."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"`{name}` must be a whole number from {low} to {high}.", param=name)
    return value


def limit(body: Body, name: str) -> int | None:
    """The maximum number of tokens to generate. None, also for llama-server's -1: the client sets no limit."""
    return None if body.get(name) == -1 else whole(body, name, 0, MAX_TOKENS)


def check_least(sampling: SamplingParams, most: int | None) -> None:
    """Raises InvalidRequest if an answer must be longer than it may be."""
    if most is not None and sampling.min_tokens > most:
        raise InvalidRequest(
            f"`min_tokens` is {sampling.min_tokens}, and the answer may have {most} tokens. Ask for fewer, or raise "
            "the limit.",
            param="min_tokens",
        )


def only_one(body: Body, name: str) -> None:
    """Checks a field for the number of answers."""
    if whole(body, name, 1, MAX_TOKENS) not in (None, 1):
        advice = "this server gives one answer a request. Send more requests for more."
        raise InvalidRequest(f"`{name}` must be 1: {advice}", param=name)


def answers(body: Body) -> int:
    """`n`: how many answers are wanted."""
    return whole(body, "n", 1, MAX_ANSWERS) or 1


def flag(body: Body, name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"`{name}` must be true or false.", param=name)
    return value


def text(body: Body, name: str) -> str:
    """A string; empty if absent."""
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"`{name}` must be a string.", param=name)
    return value


def obj(body: Body, name: str) -> Mapping[str, Any]:
    """An object; empty if absent."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{name}` must be an object.", param=name)
    return value


def items(body: Body, name: str) -> list[Any]:
    """A list; empty if absent."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"`{name}` must be a list.", param=name)
    return value


def stop_strings(body: Body, name: str) -> tuple[str, ...]:
    """A string or a list of strings. Empty strings are dropped, since they stop nothing."""
    value = body.get(name)
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequest(f"`{name}` must be a string or a list of strings.", param=name)
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        raise InvalidRequest(
            f"`{name}` takes at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters.", param=name
        )
    return tuple(string for string in strings if string)


def steering(body: Body) -> Mapping[str, float] | None:
    """`{"control vector": scale}`; None if absent. The engine checks whether the vectors exist."""
    if body.get("steering") is None:
        return None
    vectors = obj(body, "steering")
    if len(vectors) > MAX_STEERING_VECTORS:
        raise InvalidRequest(f"`steering` takes at most {MAX_STEERING_VECTORS} vectors.", param="steering")
    for name, scale in vectors.items():
        good = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not good or not -MAX_STEERING_SCALE <= scale <= MAX_STEERING_SCALE:
            words = f"a number from {-MAX_STEERING_SCALE:g} to {MAX_STEERING_SCALE:g}"
            raise InvalidRequest(f"`steering.{name}` must be {words}.", param=f"steering.{name}")
    return {name: float(scale) for name, scale in vectors.items()}


def adapters(body: Body) -> Mapping[int, float] | None:
    """llama-server's `lora`: `[{"id": place, "scale": scale}]`; None if absent. The engine knows which there are."""
    if body.get("lora") is None:
        return None
    given = items(body, "lora")
    if len(given) > MAX_ADAPTERS:
        raise InvalidRequest(f"`lora` takes at most {MAX_ADAPTERS} adapters.", param="lora")
    scales: dict[int, float] = {}
    for place, item in enumerate(given):
        at = f"lora[{place}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"`{at}` must be an object with `id` and `scale`.", param=at)
        named = {f"{at}.{name}": item.get(name) for name in ("id", "scale")}
        number_at = whole(named, f"{at}.id", 0, MAX_ADAPTERS - 1)
        scale = number(named, f"{at}.scale", -MAX_STEERING_SCALE, MAX_STEERING_SCALE)
        if number_at is None or scale is None:
            raise InvalidRequest(f"`{at}` needs an `id` and a `scale`.", param=at)
        if number_at in scales:
            raise InvalidRequest(f"`lora` names adapter {number_at} twice.", param=at)
        scales[number_at] = scale
    return scales


def sampling(body: Body) -> SamplingParams:
    """Sampling fields, by their names in the OpenAI API and llama.cpp. The defaults are those of `SamplingParams`."""
    known = SamplingParams()

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    biases = _biases(body)
    top_k, seed = whole(body, "top_k", -1, MAX_TOP_K), whole(body, "seed", MIN_SEED, MAX_SEED)
    repetition = number(body, "repetition_penalty", *REPETITION_PENALTIES)
    if repetition is None:
        repetition = number(body, "repeat_penalty", *REPETITION_PENALTIES)
    return SamplingParams(
        temperature=given(number(body, "temperature", 0.0, 100.0), known.temperature),
        top_p=max(LEAST_TOP_P, given(number(body, "top_p", 0.0, 1.0), known.top_p)),
        top_k=max(0, top_k) if top_k is not None else known.top_k,
        min_p=given(number(body, "min_p", 0.0, 1.0), known.min_p),
        repetition_penalty=given(repetition, known.repetition_penalty),
        presence_penalty=given(number(body, "presence_penalty", -2.0, 2.0), known.presence_penalty),
        frequency_penalty=given(number(body, "frequency_penalty", -2.0, 2.0), known.frequency_penalty),
        seed=None if seed == RANDOM_SEED else seed,
        logit_bias={token: bias for token, bias in biases if isinstance(token, int)},
        text_bias=tuple((token, bias) for token, bias in biases if isinstance(token, str)),
        ignore_eos=flag(body, "ignore_eos", default=False),
        min_tokens=whole(body, "min_tokens", 0, MAX_TOKENS) or 0,
    )


def top_logprobs(body: Body, *, asked: bool) -> int | None:
    """How many tokens are wanted with their logprobs in each place besides the answer's own; None if `asked` is
    False."""
    others = whole(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if others and not asked:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return (others or 0) if asked else None


def _biases(body: Body) -> list[tuple[int | str, float]]:
    """`{"token id or text": bias}`, or as in llama-server `[[token id or text, bias]]`. A bias is from -100 to 100, or
    false: never."""
    given = body.get("logit_bias")
    if given is None:
        return []
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest(
            "`logit_bias` must be an object, or a list of pairs of token and bias.", param="logit_bias"
        )
    if len(pairs) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"`logit_bias` takes at most {MAX_LOGIT_BIASES} tokens.", param="logit_bias")
    return [(_biased(token), _bias(bias)) for token, bias in pairs]


def _biased(token: Any) -> int | str:
    if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= TOKEN_ID_DIGITS:
        return int(token)
    if isinstance(token, str) and 0 < len(token) <= MAX_STOP_CHARACTERS and not token.isdecimal():
        return token
    if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 10**TOKEN_ID_DIGITS:
        return token
    raise InvalidRequest(
        f"`logit_bias` must name tokens by their ids, or by texts of at most {MAX_STOP_CHARACTERS} characters.",
        param="logit_bias",
    )


def _bias(bias: Any) -> float:
    if bias is False:
        return -math.inf
    if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
        raise InvalidRequest(
            "`logit_bias` must map tokens to numbers from -100 to 100, or to false for never.", param="logit_bias"
        )
    return float(bias)
