"""The vocabulary of state, for engines, store, lane and replay alike: layouts and where they resume, moves, costs.

layout.py        what a conversation's state consists of, in bytes; one digest, one rule where it can be resumed
moves.py         one capture or restore: which bytes go where, and their checksums
checkpoints.py   the copies of fixed state that an engine holds
costs.py         what reading tokens and moving bytes cost
prompts.py       images and control vectors, which shape state beside the tokens
"""

from parkd.state.checkpoints import KeptStates, chunk_end
from parkd.state.costs import Costs
from parkd.state.layout import DIGEST_BYTES, Grain, Resume, StageLayout, StateLayout, last_exact
from parkd.state.moves import (
    Bytes,
    Checksums,
    FixedPart,
    RowRun,
    StageTransfer,
    StateFile,
    StateSizes,
    Sums,
    Transfer,
)
from parkd.state.prompts import ImageFacts, ImageSize, ImageTokens, VectorFile

__all__ = [
    "DIGEST_BYTES",
    "Bytes",
    "Checksums",
    "Costs",
    "FixedPart",
    "Grain",
    "ImageFacts",
    "ImageSize",
    "ImageTokens",
    "KeptStates",
    "Resume",
    "RowRun",
    "StageLayout",
    "StageTransfer",
    "StateFile",
    "StateLayout",
    "StateSizes",
    "Sums",
    "Transfer",
    "VectorFile",
    "chunk_end",
    "last_exact",
]
