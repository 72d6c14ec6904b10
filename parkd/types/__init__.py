"""Plain values that every part of parkd knows.

Nothing here has behaviour beyond deriving one value from another. Positions count tokens from the start of a
conversation; sizes are bytes; a `[start, stop)` pair is half-open.
"""

from parkd.types.events import (
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
)
from parkd.types.identity import (
    HASH_BYTES,
    ConversationKey,
    ImageSpan,
    NamedKey,
    PromptIdentity,
    Proof,
    Rewrite,
    SegmentSpan,
    TokenIds,
    Units,
)
from parkd.types.report import (
    CacheOutcome,
    CacheReport,
    Diagnosis,
    DiagnosisKind,
    Divergence,
    DraftCounts,
    Timings,
)
from parkd.types.request import (
    CacheHints,
    CacheMode,
    ImageData,
    Message,
    ReasoningParams,
    SamplingParams,
    TokenMask,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)

__all__ = [
    "HASH_BYTES",
    "CacheHints",
    "CacheMode",
    "CacheOutcome",
    "CacheReport",
    "ConversationKey",
    "Diagnosis",
    "DiagnosisKind",
    "Divergence",
    "DraftCounts",
    "Event",
    "FinishReason",
    "Finished",
    "ImageData",
    "ImageSpan",
    "Message",
    "NamedKey",
    "Progress",
    "PromptIdentity",
    "Proof",
    "ReasoningDelta",
    "ReasoningParams",
    "Rewrite",
    "SamplingParams",
    "SegmentSpan",
    "Started",
    "TextDelta",
    "Timings",
    "TokenIds",
    "TokenMask",
    "ToolCallDelta",
    "ToolChoice",
    "ToolChoiceMode",
    "TurnRequest",
    "Units",
]
