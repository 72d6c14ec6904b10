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
    Timings,
)
from parkd.types.request import (
    CacheHints,
    CacheMode,
    Message,
    ReasoningParams,
    SamplingParams,
    TokenMask,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from parkd.types.state import (
    Bytes,
    Checksums,
    FixedPart,
    RowRun,
    StageLayout,
    StageTransfer,
    StateLayout,
    Transfer,
)

__all__ = [
    "HASH_BYTES",
    "Bytes",
    "CacheHints",
    "CacheMode",
    "CacheOutcome",
    "CacheReport",
    "Checksums",
    "ConversationKey",
    "Diagnosis",
    "DiagnosisKind",
    "Divergence",
    "Event",
    "FinishReason",
    "Finished",
    "FixedPart",
    "ImageSpan",
    "Message",
    "NamedKey",
    "Progress",
    "PromptIdentity",
    "ReasoningDelta",
    "ReasoningParams",
    "RowRun",
    "SamplingParams",
    "SegmentSpan",
    "StageLayout",
    "StageTransfer",
    "Started",
    "StateLayout",
    "TextDelta",
    "Timings",
    "TokenIds",
    "TokenMask",
    "ToolCallDelta",
    "ToolChoice",
    "ToolChoiceMode",
    "Transfer",
    "TurnRequest",
    "Units",
]
