"""What a client asks for, independent of the API dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

StillWanted = Callable[[], None]
"""Called between two pieces of work that is done for a client: raises Cancelled once the client has left."""


def always_wanted() -> None:
    """The `StillWanted` of work that nobody gives up."""


class TokenMask(Protocol):
    """Constrains what may be sampled next (structured output)."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """`[vocab]`, True where the token may come next."""

    def accept(self, token_id: int) -> None:
        """Advances by the token that was sampled."""


@dataclass(frozen=True, slots=True)
class ImageData:
    """An image as the client sent it, in a message part `{"type": "image", "image": ImageData}`."""

    base64: str = field(repr=False)
    where: str
    """The field that contains it, for errors."""
    refusal: str = ""
    """If its data was not sent: why it cannot be used, and what to do. Reported only if the model reads images at
    all."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings as in the OpenAI API and llama.cpp."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit; minus infinity: never."""
    text_bias: tuple[tuple[str, float], ...] = ()
    """The same for all tokens of texts; moved to `logit_bias` when the prompt is built."""
    ignore_eos: bool = False
    """The model cannot end the answer."""
    min_tokens: int = 0
    """Nor before so many tokens of it."""
    top_logprobs: int | None = None
    """Logprobs of the answer's tokens are wanted, and of so many others in each place; None: none are."""


Message = Mapping[str, Any]
"""A chat message in the canonical form that chat templates take (`role`, `content`, `tool_calls`, ...)."""


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    """The tool that must be called; set exactly when `mode` is `NAMED`."""
    allowed: frozenset[str] | None = None
    """The tools that may be called, all of which are in the prompt; None: every tool."""


class FormKind(StrEnum):
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class TextForm:
    """A form that the answer must have, other than JSON under a schema."""

    kind: FormKind
    source: str | tuple[str, ...]
    """A regular expression that matches the whole answer; the texts to choose from; or a grammar, in llama.cpp's GBNF
    or llguidance's Lark."""
    param: str
    """The field of the request, for errors."""


@dataclass(frozen=True, slots=True)
class ReasoningParams:
    """How much the client wants the model to think. What chat templates understand is also in `template_kwargs`."""

    enabled: bool | None = None
    """None leaves it to the template."""
    effort: str | None = None
    """As the client says it: `none`, `minimal`, `low`, `medium`, `high`, `max`, ..."""
    budget_tokens: int | None = None


class TurnClass(StrEnum):
    """How soon a request's answer is wanted."""

    INTERACTIVE = "interactive"
    SIDE = "side"
    """Asks for little, beside something else."""
    BATCH = "batch"
    """Nobody waits for it."""


class CacheMode(StrEnum):
    USE = "use"
    READ = "read"
    """Reuses state, but keeps nothing of this turn."""
    OFF = "off"
    """Neither reuses nor keeps."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """What the client asks about caching. Hints, never proof of identity."""

    mode: CacheMode = CacheMode.USE
    min_retention_s: float | None = None
    """The longest `cache_control.ttl` of the request."""
    group: str | None = None
    """`prompt_cache_key`."""
    salt: str | None = None
    """`cache_salt`: narrows the caller's namespace, never widens it."""
    compare_to: str | None = None
    """The id of an earlier answer, if the client asks why its prompt was not reused completely."""
    wants_diagnosis: bool = False
    """The client will compare this request with another, so its parts are remembered."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A text with a gap, which the answer is to fill."""

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    """Names and texts of other files of the project."""
    begun: str = ""
    """The beginning of what is in the gap."""
    opening: str = ""
    """What the vocabulary puts before every text."""
    param: str = "suffix"
    """The field that asked for it, for errors."""


@dataclass(frozen=True)
class TurnRequest:
    """One request, independent of the API dialect."""

    messages: Sequence[Message] = ()
    prompt: str | None = None
    """Raw text of a legacy completion; `messages` is then empty."""
    infill: Infill | None = None
    """What the prompt is made of instead; `prompt` is then empty."""
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    """None: up to the server's limit and the context's end. 0: the prompt is read and kept, nothing is generated."""
    answers: int = 1
    """How many are generated, one after the other."""
    stream: bool = False
    namespace: str = ""
    model: str = ""
    """As the client named it; echoed, never checked."""
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    strict_tools: frozenset[str] = frozenset()
    """Names of the tools whose calls, if forced, must obey every keyword of their schemas."""
    parallel_tool_calls: bool = True
    response_schema: Mapping[str, Any] | None = None
    """A JSON schema the answer must obey; `{"type": "object"}` for any JSON object."""
    response_form: TextForm | None = None
    """None if `response_schema` is given."""
    reasoning: ReasoningParams = field(default_factory=ReasoningParams)
    cache: CacheHints = field(default_factory=CacheHints)
    timings_per_token: bool = False
    """Each piece of the answer says what the turn took so far."""
    opens_answer: bool = True
    """The prompt ends with what opens an answer."""
    continues: bool = False
    """The last message is the beginning of the answer: the prompt ends inside it, and only what follows is sent."""
    steering: Mapping[str, float] | None = None
    """Scale of each control vector. The complete set: others do not steer. None: the server's default."""
    adapters: Mapping[int, float] | None = None
    """Scale of each LoRA adapter, by its place among those of the server. The complete set: others do not apply. None:
    the server's default."""
