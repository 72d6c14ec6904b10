"""The vocabulary of state, for engines, store, lane and replay alike: layouts and where they resume, moves, costs.

layout.py        what a conversation's state consists of, in bytes; one digest, one rule where it can be resumed
fields.py        the fields of each layer, by which those bytes can be cut for another layer split
described.py     a layout as text, and back
recut.py         from the parts of one layer split to those of another
sums.py          the checksums of parts
moves.py         one capture or restore: which bytes go where, and their checksums
checkpoints.py   the copies of fixed state that an engine holds
costs.py         what reading tokens and moving bytes cost
engine_config.py how a model is laid out on its devices
drafts.py        how many guesses of a draft head came true
prompts.py       images and control vectors, which shape state beside the tokens
"""

from parkd.state.checkpoints import KeptStates, chunk_end
from parkd.state.costs import Costs
from parkd.state.described import LAYOUT_LIMIT_BYTES, DamagedLayout, describe, layout_from
from parkd.state.drafts import DraftCounts
from parkd.state.engine_config import EngineConfig
from parkd.state.fields import DIGEST_BYTES, PLAIN_DTYPES, StateField, stage_digest
from parkd.state.layout import BLOCK_TOKENS, Grain, Resume, StageLayout, StateLayout, last_exact
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
from parkd.state.recut import OtherState, Recut, recut_between
from parkd.state.sums import part_sum

__all__ = [
    "BLOCK_TOKENS",
    "DIGEST_BYTES",
    "LAYOUT_LIMIT_BYTES",
    "PLAIN_DTYPES",
    "Bytes",
    "Checksums",
    "Costs",
    "DamagedLayout",
    "DraftCounts",
    "EngineConfig",
    "FixedPart",
    "Grain",
    "ImageFacts",
    "ImageSize",
    "ImageTokens",
    "KeptStates",
    "OtherState",
    "Recut",
    "Resume",
    "RowRun",
    "StageLayout",
    "StageTransfer",
    "StateField",
    "StateFile",
    "StateLayout",
    "StateSizes",
    "Sums",
    "Transfer",
    "VectorFile",
    "chunk_end",
    "describe",
    "last_exact",
    "layout_from",
    "part_sum",
    "recut_between",
    "stage_digest",
]
