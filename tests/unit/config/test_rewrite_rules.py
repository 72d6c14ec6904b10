"""The file of rewrite rules: what it may say, and that a wrong one is told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkd import cli
from parkd.config import load
from parkd.config.rewrite_rules import read_rules
from parkd.errors import ConfigError
from parkd.identity.normalise import Normaliser, NormaliserConfig, RewriteRule

GOOD = """
[[rule]]
name = "clock"
pattern = 'Time: (\\d+)'
replacement = 'Time: x'
roles = ["user"]

[[rule]]
pattern = "tmp"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def test_rules_in_order_with_what_is_left_out_filled_in(tmp_path: Path) -> None:
    rules = read_rules(written(tmp_path, GOOD))
    assert rules == (
        RewriteRule("Time: (\\d+)", "Time: x", ("user",), "clock"),
        RewriteRule("tmp", "", ("system", "developer"), ""),
    )
    messages, rewrites = Normaliser(NormaliserConfig(rules=rules)).apply(
        [{"role": "system", "content": "tmp tmp"}, {"role": "user", "content": "Time: 12 tmp"}]
    )
    assert [message["content"] for message in messages] == [" ", "Time: x tmp"]
    assert [(rewrite.rule, rewrite.places) for rewrite in rewrites] == [("clock", 1), ("tmp", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rule]", "not valid TOML"),
        ("", "expected 1 to 64 tables"),
        ("rule = 3", "expected 1 to 64 tables"),
        ("[[rule]]\npattern = 'a'\n[other]\n", "expected 1 to 64 tables"),
        ("[[rule]]\nname = 'x'", "rule 1: `pattern` must be"),
        ("[[rule]]\npattern = 3", "rule 1: `pattern` must be"),
        ("[[rule]]\npattern = 'a'\n[[rule]]\npattern = 'b'\nrole = 'user'", "rule 2: unknown key 'role'"),
        ("[[rule]]\npattern = 'a'\nroles = ['users']", "rule 1: `roles` must be"),
        ("[[rule]]\npattern = '('", "is not valid"),
        ("[[rule]]\npattern = 'a'\nreplacement = '\\1'", "is not valid"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_rules(written(tmp_path, text))
    assert words in error.value.message


def test_a_wrong_file_ends_the_start_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "[[rule]]\npattern = '('")
    assert cli.main(["--model", "there/is-none", "--rewrite-rules", str(path)]) == 2
    assert "is not valid" in capsys.readouterr().err
    assert load({"rewrite-rules": str(path)}, {}).server.rewrite_rules_file == path
