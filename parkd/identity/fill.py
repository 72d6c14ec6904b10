"""Prompts that ask a model to fill in the middle of a text, with the tokens that its vocabulary has for this.

    <repo>project <file>a.py\\n... <file>filename\\n <prefix>text before<suffix>text behind<middle>  -> what is between

Layout: the README of llama.cpp's server, and the model cards of the families. What a client sends has stand-ins, so
that it cannot write one of these tokens itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from parkd.errors import InvalidRequest
from parkd.types import Infill

PROJECT, FILENAME = "myproject", "filename"
"""The names that llama-server gives the repository, and the file that is filled."""


@dataclass(frozen=True, slots=True)
class FillMarks:
    """A family's tokens for this. `repository` and `file` may be missing in a vocabulary."""

    prefix: str
    suffix: str
    middle: str
    """Empty: the answer follows the prefix, which is then behind the suffix."""
    repository: str = ""
    file: str = ""


FAMILIES = (
    FillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    FillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    FillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillMarks("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    FillMarks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    FillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillMarks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    FillMarks("<PRE>", "<SUF>", "<MID>"),
    FillMarks("[PREFIX]", "[SUFFIX]", ""),
)
"""The first whose tokens a vocabulary has is its own: Qwen and Granite, StarCoder, SantaCoder, DeepSeek (two), GLM,
Code Llama (two), Codestral."""


def fill_marks(special_tokens: Collection[str]) -> FillMarks | None:
    """The tokens of this vocabulary; None if it has none."""
    known = frozenset(special_tokens)
    return next((marks for marks in FAMILIES if {marks.prefix, marks.suffix, marks.middle} - {""} <= known), None)


def fill_prompt(infill: Infill, special_tokens: Collection[str], put: Callable[[str], str]) -> str:
    """The prompt's text. `put` is applied to what the client sent. Raises InvalidRequest for a model without such
    tokens."""
    marks = fill_marks(special_tokens)
    if marks is None:
        raise InvalidRequest(
            "This model cannot fill in the middle of a text: its vocabulary has no tokens for that. Serve a model that "
            "was trained for it, such as Qwen2.5-Coder, or send the text before the gap to POST /v1/completions.",
            param=infill.param,
        )
    known = frozenset(special_tokens)
    before = ""
    if infill.files and marks.repository in known and marks.file in known:
        files = [f"{marks.file}{put(name)}\n{put(text)}" for name, text in infill.files]
        before = f"{marks.repository}{PROJECT}\n{''.join(files)}{marks.file}{FILENAME}\n"
    elif infill.files:
        before = "".join(put(text) for _, text in infill.files)
    prefix, suffix = f"{marks.prefix}{put(infill.prefix)}", f"{marks.suffix}{put(infill.suffix)}"
    middle = f"{prefix}{suffix}{marks.middle}" if marks.middle else f"{suffix}{prefix}"
    return f"{infill.opening}{before}{middle}{put(infill.begun)}"
