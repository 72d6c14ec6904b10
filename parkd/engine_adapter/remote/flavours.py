"""What each kind of server takes and tells, beyond what all have in common. One record each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from parkd.types import FormKind

OPENAI_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
"""Sampling that every server is told, under parkd's own names."""


class Continues(Enum):
    """How a server is told that the last message is the beginning of its answer."""

    NO = auto()
    BY_FIELDS = auto()
    """`continue_final_message`, and no generation prompt."""
    BY_ITSELF = auto()
    """It goes on with a last message that is its own."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """One kind of server."""

    name: str
    sampling: Mapping[str, str] | None = None
    """What it samples by besides `OPENAI_SAMPLING`: parkd's names -> its own. None: it is told all that is asked, and
    refuses what it cannot do."""
    lacks: frozenset[str] = frozenset()
    """Of `OPENAI_SAMPLING`, what it does not take."""
    forces_calls: bool = True
    """It takes `tool_choice`."""
    schemas: bool = True
    """It takes `response_format` with a JSON schema."""
    forms: Mapping[FormKind, str] = field(default_factory=dict)
    """Other forms of answers that it enforces -> the field that asks for them, `outer.inner` for one in an object."""
    salts: bool = False
    """It takes `cache_salt`: requests of different salts share no state."""
    takes_ids: bool = False
    """`/v1/completions` takes a prompt as ids, and returns those of the answer (`return_token_ids`)."""
    template_kwargs: bool = False
    """It takes `chat_template_kwargs`."""
    takes_effort: bool = True
    """It takes `reasoning_effort`."""
    continues: Continues = Continues.NO
    counts_always: str = ""
    """The field that makes each event say what is counted so far, `outer.inner` for one in an object."""
    token_events: bool = True
    """An event with text is one token or more."""
    thought_field: str = ""
    """The field of a message with earlier thinking; empty: it takes none back."""
    transfers: bool = False
    """It takes `kv_transfer_params`."""
    scores: bool = False
    """`/v1/completions` returns logprobs by ids (`return_tokens_as_token_ids`)."""
    events: bool = False
    """It publishes what it keeps of prompts."""


_MORE_SAMPLING = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
}

_STRUCTURED = {
    FormKind.REGEX: "structured_outputs.regex",
    FormKind.CHOICE: "structured_outputs.choice",
    FormKind.GRAMMAR: "structured_outputs.grammar",
}

VLLM = Flavour(
    "vLLM",
    sampling=_MORE_SAMPLING,
    forms=_STRUCTURED,
    salts=True,
    takes_ids=True,
    template_kwargs=True,
    continues=Continues.BY_FIELDS,
    counts_always="stream_options.continuous_usage_stats",
    thought_field="reasoning",
    transfers=True,
    scores=True,
    events=True,
)
SGLANG = Flavour(
    "SGLang",
    sampling=_MORE_SAMPLING,
    forms={FormKind.REGEX: "regex"},
    salts=True,
    takes_ids=True,
    template_kwargs=True,
    continues=Continues.BY_FIELDS,
    counts_always="stream_options.continuous_usage_stats",
    thought_field="reasoning_content",
    events=True,
)
LLAMA_SERVER = Flavour(
    "llama-server",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty", "ignore_eos": "ignore_eos"},
    forms={FormKind.GRAMMAR: "grammar"},
    template_kwargs=True,
    continues=Continues.BY_ITSELF,
    counts_always="timings_per_token",
    thought_field="reasoning_content",
)
OLLAMA = Flavour(
    "Ollama",
    sampling={},
    lacks=frozenset({"logit_bias"}),
    forces_calls=False,
    thought_field="reasoning",
)
LM_STUDIO = Flavour("LM Studio", sampling={"top_k": "top_k", "repetition_penalty": "repeat_penalty"})
OMLX = Flavour(
    "oMLX",
    sampling={"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"},
    lacks=frozenset({"logit_bias"}),
    forces_calls=False,
    forms=_STRUCTURED,
    template_kwargs=True,
    thought_field="reasoning_content",
)
TGI = Flavour("TGI", sampling={}, takes_effort=False)
HOSTED = Flavour("OpenAI-style", token_events=False)
"""All others, such as a hosted API: asked as its API says, and what it does not know it refuses itself. Some cut their
text into smaller pieces than tokens, to make it flow."""

FLAVOURS = (VLLM, SGLANG, LLAMA_SERVER, OLLAMA, LM_STUDIO, OMLX, TGI, HOSTED)
