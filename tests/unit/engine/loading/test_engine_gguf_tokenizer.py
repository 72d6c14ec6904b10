"""Byte-level vocabularies of GGUF files give the ids of the tokenizers that they were written from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from parkd_engine.loading.gguf_tokenizer import CONTROL, USER_DEFINED, save_tokenizer
from tokenizers import Tokenizer

from parkd.model_files.gguf_metadata import GgufMetadata
from tests.npm_tokenizers import npm_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SNIPPETS = (
    *("x", " ", "   ", "\n", "\n\n", "\r\n", "\t", "word", " word", "1234567", " 12", "3.14", "é", "e\u0301", "\u0301"),
    *(
        "日本語",
        "。",
        "🙂",
        "👩\u200d👩\u200d👧",
        "½",
        " ²",
        "٣٤٥",
        "Ⅻ",
        "'s",
        "'RE",
        "I'LL",
        "\u2019s",
        "\u00a0",
        "\ufeff",
        "\u2028",
    ),
    *(
        "def f(x):\n    return x",
        "<h1>",
        "ﬁ",
        "Straße",
        "мир",
        "مرحبا",
        "ไทย",
        "한국어",
        "...",
        "!!\n",
        "$1,000.00",
        "foo_bar",
    ),
)
TEXTS = 3000


def metadata(tokenizer_file: Path, way: str) -> GgufMetadata:
    """The entries that llama.cpp's converter makes of a `tokenizer.json`."""
    content = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = dict(content["model"]["vocab"])
    added = {entry["content"]: entry for entry in content["added_tokens"]}
    vocabulary |= {text: entry["id"] for text, entry in added.items()}
    tokens = [f"[PAD{number}]" for number in range(max(vocabulary.values()) + 1)]
    for token, number in vocabulary.items():
        tokens[number] = token
    kinds = [1] * len(tokens)
    for entry in added.values():
        kinds[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    entries = {"model": "gpt2", "pre": way, "tokens": tokens, "token_type": kinds, "merges": merges}
    return GgufMetadata(tokenizer_file, {f"tokenizer.ggml.{name}": value for name, value in entries.items()})


def texts(special: list[str]) -> list[str]:
    draw = random.Random(5)
    pool = [*SNIPPETS, *special]
    mixed = ["".join(draw.choices(pool, k=draw.randint(1, 12))) for _ in range(TEXTS)]
    planes = [(0x20, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF)]
    strange = ["".join(chr(draw.randint(*draw.choice(planes))) for _ in range(20)) for _ in range(TEXTS // 10)]
    return [*SNIPPETS, *special, *mixed, *strange]


@pytest.mark.parametrize(("family", "way"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe")])
def test_ids_are_those_of_the_original_tokenizer(family: str, way: str, tmp_path: Path) -> None:
    source = npm_folder(family) / "tokenizer.json"
    original = Tokenizer.from_file(str(source))
    save_tokenizer(metadata(source, way), tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [token.content for token in original.get_added_tokens_decoder().values()][:40]
    # Every token's own text: some are whole tokens that no merge leads to.
    single = [original.decode([number]) for number in range(0, original.get_vocab_size(), 3)]
    for text in [*texts(special), *single]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == expected, repr(text)
