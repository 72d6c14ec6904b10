"""Long prompts that are the same on every machine.

Paragraphs of the licence (English like that in pasted documents) alternate with seeded reports full of names, numbers
and punctuation, so that tokenisers get ordinary words and text that splits badly. The project's own pages are not used,
because they change with every commit and would change the figures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.common import REPOSITORY

SUBJECTS = ("The pump", "Unit 7's controller", "The night crew", "A courier", "The archive", "Dr. Okonkwo", "The lab")
VERBS = ("reported", "measured", "rejected", "moved", "confirmed", "recalculated", "photographed", "lost track of")
OBJECTS = ("the second valve", "a batch of samples", "the north gate", "an unsigned invoice", "the spare turbine")
TAILS = (
    "before anyone had asked for it",
    "although the log says otherwise (see entry #{n})",
    "at {h:02d}:{m:02d}, {n} minutes late",
    "for €{n}.{m:02d}, which is {h}% above the estimate",
    "because `retry_limit={h}` had been set in config/{n}.toml",
    "and nobody noticed until week {h}",
)


def _sentence(source: random.Random) -> str:
    tail = source.choice(TAILS).format(n=source.randrange(10, 9999), h=source.randrange(24), m=source.randrange(60))
    return f"{source.choice(SUBJECTS)} {source.choice(VERBS)} {source.choice(OBJECTS)} {tail}."


def _licence_paragraphs() -> list[str]:
    text = (REPOSITORY / "LICENSE").read_text()
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if len(paragraph.split()) > 20]


def _paragraphs(seed: int) -> Iterator[str]:
    source = random.Random(seed)
    licence = _licence_paragraphs()
    source.shuffle(licence)
    number = 0
    while True:
        number += 1
        yield f"Report {seed}-{number}. " + " ".join(_sentence(source) for _ in range(source.randrange(4, 9)))
        yield licence[number % len(licence)]


def document(seed: int, characters: int) -> str:
    """Paragraphs up to `characters`. Texts of different seeds differ from their first words on."""
    parts: list[str] = []
    length = 0
    for paragraph in _paragraphs(seed):
        parts.append(paragraph)
        length += len(paragraph) + 2
        if length >= characters:
            break
    return "\n\n".join(parts)[:characters]


def opening(name: str, seed: int, characters: int, question: str) -> list[dict[str, str]]:
    """The messages of a conversation's first turn: its own system prompt, a document and a question."""
    return [
        {"role": "system", "content": f"{name} is the reader of file {seed}. Answer from the document alone."},
        {"role": "user", "content": f"{document(seed, characters)}\n\n{question}"},
    ]


def next_turn(messages: list[dict[str, str]], answer: str, question: str) -> list[dict[str, str]]:
    """The messages of the next turn: the whole history, as the client received it, and the question."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
