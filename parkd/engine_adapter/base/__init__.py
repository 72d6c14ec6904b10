"""The one seam between the daemon and an engine.

An adapter is used from one thread only, the engine's own; the event loop never calls it, except for what is marked
thread-safe. The adapter owns the live state; the daemon owns what that state means (which units are in it).

    arena rows   0 ............ position ................ context_tokens
                 |-- valid ----|-- whatever was there --|

Engines differ in the grain of their state. Some give rows of each stage, which are cut in blocks and shared; others
give a conversation whole, as bytes or as a file. They also differ in what they can do besides. All that is above this
seam is the same for all: it asks `EngineInfo`, or calls a method that every engine has.
"""

from parkd.engine_adapter.base.engine import (
    AdapterInfo,
    BegunPrompt,
    Cancel,
    CaptureInFlight,
    Engine,
    EngineInfo,
    HostExpertsInfo,
    OneSeatEngine,
    ScoredToken,
    Seat,
    check_adapters,
)
from parkd.engine_adapter.base.text import (
    ChatTemplate,
    Embedder,
    ImageReader,
    Rendered,
    ResponseReader,
    TextStream,
    Tokenizer,
)

__all__ = [
    "AdapterInfo",
    "BegunPrompt",
    "Cancel",
    "CaptureInFlight",
    "ChatTemplate",
    "Embedder",
    "Engine",
    "EngineInfo",
    "HostExpertsInfo",
    "ImageReader",
    "OneSeatEngine",
    "Rendered",
    "ResponseReader",
    "ScoredToken",
    "Seat",
    "TextStream",
    "Tokenizer",
    "check_adapters",
]
