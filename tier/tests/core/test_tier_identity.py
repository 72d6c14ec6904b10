"""Whose state is it, and why can't it be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from parkd_tier.identity import Identity
from parkd_tier.weights import weights_digest

from parkd.errors import ConfigError
from parkd.model_files.cache import ModelCache

ONE = Identity({"weights": "aa", "vllm": "0.32.0"}, {"tensor parallel size": 1, "groups": [[16, ["a"]]]})


@pytest.mark.parametrize(
    "other",
    [
        Identity({"weights": "ab", "vllm": "0.32.0"}, ONE.rows),
        Identity({"weights": "aa", "vllm": "0.32.1"}, ONE.rows),
        Identity({"weights": "aa"}, ONE.rows),
        Identity(ONE.model, {"tensor parallel size": 2, "groups": [[16, ["a"]]]}),
        Identity(ONE.model, {"tensor parallel size": 1, "groups": [[16, ["b"]]]}),
    ],
)
def test_any_other_fact_is_another_fingerprint(other: Identity) -> None:
    assert len(ONE.fingerprint) == 16
    assert other.fingerprint != ONE.fingerprint
    assert len(ONE.differences(other)) == 1


def test_a_difference_is_said_in_words() -> None:
    other = Identity(ONE.model, {**ONE.rows, "tensor parallel size": 2})
    assert ONE.differences(other) == ["tensor parallel size 2, here 1"]


def test_an_identity_survives_being_written_down() -> None:
    again = Identity.decode(ONE.encode())
    assert again is not None
    assert again.fingerprint == ONE.fingerprint
    assert again.differences(ONE) == []


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": 1, "rows": {}}', b"\xff"])
def test_what_is_no_identity_is_none(data: bytes) -> None:
    assert Identity.decode(data) is None


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_weights_are_known_by_their_content(tmp_path: Path, cache: ModelCache) -> None:
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        (tmp_path / name / "readme.txt").write_text(name)
    known = [weights_digest(tmp_path / name, cache) for name in "abc"]
    assert known[0] == known[1] != known[2]
    (tmp_path / "a" / "model.safetensors").write_bytes(b"two")
    assert weights_digest(tmp_path / "a", cache) == known[2], "the path says nothing"


def test_a_folder_without_weights_is_refused(tmp_path: Path, cache: ModelCache) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        weights_digest(tmp_path, cache)
