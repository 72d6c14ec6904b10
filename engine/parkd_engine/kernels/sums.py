"""The weighted sum of `parkd_engine.moves.checksum` over many blocks in one launch, at memory speed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE_WORDS = 1 << 15
STEP_WORDS = 1 << 11


@triton.jit
def _sums_kernel(words_ptr, out_ptr, block_words, total_words, pieces, PIECE: tl.constexpr, STEP: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    begin = block * block_words
    size = tl.minimum(block_words, total_words - begin)
    sums = tl.zeros([STEP], dtype=tl.int64)
    for start in range(0, PIECE, STEP):
        i = piece * PIECE + start + tl.arange(0, STEP)
        w = tl.load(words_ptr + begin + i, mask=i < size, other=0)
        sums += w * (2 * i + 1)
    tl.store(out_ptr + block * pieces + piece, tl.sum(sums, axis=0))


def block_sums(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """int64 `[blocks]`: for each block of `block_words` words of `words`, int64 `[n]`, the sum of word i times 2 i + 1,
    modulo 2**64, with i counted in the block. The last block may be shorter."""
    blocks = -(-len(words) // block_words)
    pieces = -(-block_words // PIECE_WORDS)
    out = torch.empty((blocks, pieces), dtype=torch.int64, device=words.device)
    _sums_kernel[(blocks, pieces)](words, out, block_words, len(words), pieces, PIECE=PIECE_WORDS, STEP=STEP_WORDS)
    return out.sum(1)
