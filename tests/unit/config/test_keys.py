"""The file of named keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkd.cli import arguments, main
from parkd.config import load
from parkd.config.keys import check_classes, read_key_file
from parkd.errors import ConfigError
from parkd.types import NamedKey


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_lines_are_keys_with_names_and_namespaces(tmp_path: Path) -> None:
    text = "# people\nanna:k1:team\n\n ben:k2:team \ncarl:k3\ndora:a/b=c:own\n"
    assert read_key_file(written(tmp_path, text)) == (
        NamedKey("anna", "k1", "team"),
        NamedKey("ben", "k2", "team"),
        NamedKey("carl", "k3"),
        NamedKey("dora", "a/b=c", "own"),
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("anna", "line 1"),
        ("anna:", "line 1"),
        ("ben:key\na:secret:x:team", "line 2: expected name:key:namespace or name:key, and it has 4 fields"),
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


def test_a_class_is_of_keys_that_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = (NamedKey("batch-1", "k1"), NamedKey("anna", "k2"))
    check_classes(load({"class": "batch-*=batch,anna=side"}, {}).server.classes, keys)
    with pytest.raises(ConfigError, match=r"--class nobody=batch: no key .* its names are anna, batch-1"):
        check_classes(load({"class": "anna=side,nobody=batch"}, {}).server.classes, keys)
    path = written(tmp_path, "anna:k2")
    assert main(["--api-key-file", str(path), "--class", "ann=batch"]) == 2
    assert "--class ann=batch: no key" in capsys.readouterr().err
    assert main(["--api-key", "k2", "--class", "anna=batch"]) == 2
    assert "there is none" in capsys.readouterr().err


def test_a_directory_is_no_file_and_is_said_to_be_one(tmp_path: Path) -> None:
    for flag, text, hint in (
        ("api-key-file", tmp_path, "it is a directory"),
        ("api-key-file", tmp_path / "none", "no such file"),
        ("rewrite-rules", tmp_path, "it is a directory"),
        ("slot-save-path", written(tmp_path, "a:b"), "it is a file"),
        ("slot-save-path", tmp_path / "keys" / "below", "no such directory"),
        ("api-key-file", tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=hint):
            load({flag: str(text)}, {})


def test_a_key_is_not_in_what_a_log_would_show() -> None:
    assert "hush" not in repr(NamedKey("a", "hush", "n"))


def test_the_key_flag_may_be_repeated() -> None:
    flags = arguments.parse(["--api-key", "one", "--api-key", "two"]).flags
    assert load(flags, {}).server.api_keys == ("one", "two")


def test_a_key_file_is_enough_for_an_address_others_reach(tmp_path: Path) -> None:
    path = written(tmp_path, "a:b")
    assert load({"host": "0.0.0.0", "api-key-file": str(path)}, {}).server.api_key_file == path
