"""The one seam between the daemon and an engine.

An adapter is used from one thread only, the engine's own; the event loop never calls it, except for what is marked
thread-safe. The adapter owns the live state; the daemon owns what that state means (which units are in it).

    arena rows   0 ............ position ................ context_tokens
                 |-- valid ----|-- whatever was there --|

Engines differ in the grain of their state. Some give rows of each stage, which are cut in blocks and shared; others
give a conversation whole, as bytes or as a file. All that is above this seam is the same for both.
"""

from parkd.engine_adapter.base.engine import (
    BLOCK_TOKENS,
    Cancel,
    Engine,
    EngineInfo,
    OpaqueEngine,
    RowEngine,
    WholeState,
)
from parkd.engine_adapter.base.offers import (
    CaptureInFlight,
    DraftingEngine,
    OverlappingEngine,
    ReadingRestoreEngine,
    RemoteEngine,
)
from parkd.engine_adapter.base.text import (
    ChatTemplate,
    ImageFacts,
    ImageReader,
    ImageTokens,
    Rendered,
    ResponseReader,
    TextStream,
    Tokenizer,
)

__all__ = [
    "BLOCK_TOKENS",
    "Cancel",
    "CaptureInFlight",
    "ChatTemplate",
    "DraftingEngine",
    "Engine",
    "EngineInfo",
    "ImageFacts",
    "ImageReader",
    "ImageTokens",
    "OpaqueEngine",
    "OverlappingEngine",
    "ReadingRestoreEngine",
    "RemoteEngine",
    "Rendered",
    "ResponseReader",
    "RowEngine",
    "TextStream",
    "Tokenizer",
    "WholeState",
]
