"""The file of named keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkd.cli import arguments
from parkd.config import load
from parkd.config.keys import read_key_file
from parkd.errors import ConfigError
from parkd.types import NamedKey


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_lines_are_keys_with_names_and_namespaces(tmp_path: Path) -> None:
    text = "# people\nanna:k1:team\n\n ben:k2:team \ncarl:k3\ndora:a:b=c:own\n"
    assert read_key_file(written(tmp_path, text)) == (
        NamedKey("anna", "k1", "team"),
        NamedKey("ben", "k2", "team"),
        NamedKey("carl", "k3"),
        NamedKey("dora", "a:b=c", "own"),
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("anna", "line 1"),
        ("anna:", "line 1"),
        ("# x\nan na:secret", "line 2"),
        ("a:secret:name space", "line 1"),
        ("a:secret\na:other", "two lines have the same name"),
        ("a:secret\nb:secret", "two lines have the same key"),
        ("# nothing\n", "contains no key"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_key_file(written(tmp_path, text))
    assert hint in refused.value.message
    assert "secret" not in refused.value.message


def test_a_key_is_not_in_what_a_log_would_show() -> None:
    assert "hush" not in repr(NamedKey("a", "hush", "n"))


def test_the_key_flag_may_be_repeated() -> None:
    flags = arguments.parse(["--api-key", "one", "--api-key", "two"]).flags
    assert load(flags, {}).server.api_keys == ("one", "two")


def test_a_key_file_is_enough_for_an_address_others_reach(tmp_path: Path) -> None:
    path = written(tmp_path, "a:b")
    assert load({"host": "0.0.0.0", "api-key-file": str(path)}, {}).server.api_key_file == path
