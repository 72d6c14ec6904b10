"""The loss of quality with each KV format, on real text with the demo model.

    python -m benchmarks.perplexity [--tokens 4096] [--window 2048] [--chunk 512]

The project's own pages are read in windows. In each window, every format reads the same chunks, so that its logits can
be compared with those of float32 rows at every position: perplexity, divergence, the share of equal top tokens. The
first tokens are read again in chunks a quarter as long, to show the effect of chunking itself in each format.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.kv_format import KV_FORMATS
from parkd_engine.arenas.layout import build_layout
from parkd_engine.forward.stages import Stage, place
from parkd_engine.loading.loader import LoadConfig, load_model

from benchmarks.common import REPOSITORY, Result, Table, finish, machine, progress
from parkd.cli import find_model
from parkd.config import load

PAGES = ("README.md", "docs/ARCHITECTURE.md", "docs/OPERATIONS.md", "docs/API.md", "docs/CONTRIBUTING.md")
FORMATS = ("f32", "f16", "bf16", "int8")
"""The first is the reference for the others."""


@dataclass
class Tally:
    """Sums over all positions, for one format."""

    loss: float = 0.0
    divergence: float = 0.0
    """Kullback-Leibler divergence of the first format's distribution from this one's, in nats."""
    same_top: int = 0
    positions: int = 0
    chunk_difference: float = 0.0
    """The largest difference of any logit between the two chunkings."""
    window_losses: list[float] = field(default_factory=list)


class Reader:
    """A model with rows of one format that returns the logits at every position."""

    def __init__(self, loaded: Any, stage: Stage, kv_dtype: torch.dtype, tokens: int) -> None:
        (layout,) = build_layout(loaded.config, [(stage.first_layer, stage.end_layer)], kv_dtype)
        self.row_bytes = layout.row_bytes
        self._stage = stage
        self._cache = StageCache(StageArena(layout, tokens, "cpu"), stage.num_layers)

    def read(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Logits, float32 `[len(ids), vocab]`."""
        head: Any = self._stage.head
        logits: torch.Tensor = head(self._stage.forward(ids[None], self._cache, position))
        return logits[0].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="read at most so many")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    started = machine()
    model, _ = find_model(load({}, {}).model)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parkd"
    loaded = load_model(LoadConfig(model, cache))
    text = "\n\n".join((REPOSITORY / page).read_text() for page in PAGES)
    ids = torch.tensor(loaded.tokenizer.encode(text))[: options.tokens + 1]
    (stage,) = place(loaded.model, [(0, int(loaded.config.num_hidden_layers))], ["cpu"])
    tallies = {name: Tally() for name in FORMATS}
    with torch.inference_mode():
        for first in range(0, len(ids) - 1, options.window):
            window = ids[first : first + options.window + 1]
            progress(f"tokens {first} to {first + len(window) - 1} of {len(ids) - 1}")
            readers = {name: Reader(loaded, stage, KV_FORMATS[name], options.window) for name in FORMATS}
            read_window(readers, tallies, window, options.chunk)
            if first == 0:
                compare_chunks(loaded, stage, tallies, window[: 2 * options.chunk + 1], options.chunk)
    finish(result_of(tallies, readers, text, len(ids) - 1, options), started)


def read_window(readers: dict[str, Reader], tallies: dict[str, Tally], window: torch.Tensor, chunk: int) -> None:
    """Reads a chunk with every format before the next chunk, so that only one chunk's logits are held."""
    before = {name: tally.loss for name, tally in tallies.items()}
    for start in range(0, len(window) - 1, chunk):
        stop = min(start + chunk, len(window) - 1)
        targets = window[start + 1 : stop + 1]
        reference: torch.Tensor | None = None
        for name, reader in readers.items():
            scores = reader.read(window[start:stop], start).log_softmax(dim=-1)
            reference = scores if reference is None else reference
            tally = tallies[name]
            tally.loss -= float(scores.gather(1, targets[:, None]).double().sum())
            tally.divergence += float((reference.exp() * (reference - scores)).double().sum())
            tally.same_top += int((reference.argmax(-1) == scores.argmax(-1)).sum())
            tally.positions += stop - start
    for name, tally in tallies.items():
        tally.window_losses.append((tally.loss - before[name]) / (len(window) - 1))


def compare_chunks(loaded: Any, stage: Stage, tallies: dict[str, Tally], window: torch.Tensor, chunk: int) -> None:
    for name in FORMATS:
        long, short = (Reader(loaded, stage, KV_FORMATS[name], len(window)) for _ in range(2))
        for start in range(0, len(window) - 1, chunk):
            stop = min(start + chunk, len(window) - 1)
            whole = long.read(window[start:stop], start)
            size = max(1, chunk // 4)
            parts = [short.read(window[at : min(at + size, stop)], at) for at in range(start, stop, size)]
            difference = float((whole - torch.cat(parts)).abs().max())
            tallies[name].chunk_difference = max(tallies[name].chunk_difference, difference)


def result_of(
    tallies: dict[str, Tally], readers: dict[str, Reader], text: str, tokens: int, options: argparse.Namespace
) -> Result:
    base = tallies[FORMATS[0]]
    rows = []
    for name, tally in tallies.items():
        perplexity = math.exp(tally.loss / tally.positions)
        change = math.exp((tally.loss - base.loss) / tally.positions) - 1
        rows.append(
            (
                name,
                f"{readers[name].row_bytes:,}",
                f"{perplexity:.4f}",
                "" if tally is base else f"{change:+.3%}",
                "" if tally is base else f"{tally.divergence / tally.positions:.1e}",
                "" if tally is base else f"{tally.same_top / tally.positions:.2%}",
                f"{tally.chunk_difference:.1e}",
            )
        )
    columns = ("kv", "bytes a token", "perplexity", "against f32", "divergence", "same top token", "chunking")
    raw = {name: vars(tally) | {"row_bytes": readers[name].row_bytes} for name, tally in tallies.items()}
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return Result(
        name="perplexity",
        title="Quality of KV formats",
        how=f"SmolLM2-135M-Instruct, computing in float32, reads {tokens:,} tokens of this project's pages in windows "
        f"of {options.window:,} and chunks of {options.chunk}. Divergence is the mean Kullback-Leibler divergence from "
        f"float32 rows in nats; `chunking` the largest difference of any logit when the first two chunks are read "
        f"{options.chunk // 4} tokens at a time.",
        tables=[Table("Keys and values kept as", columns, tuple(rows))],
        notes=[f"The text's digest is {digest}. The pages change, so figures from another day are for another text."],
        raw=raw | {"pages": list(PAGES)},
    )


if __name__ == "__main__":
    main()
