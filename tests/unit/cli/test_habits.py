"""What people know from llama-server and Ollama works, or is answered with what does the same here."""

from __future__ import annotations

import pytest

from parkd import cli
from parkd.cli import arguments
from parkd.config import load
from parkd.proxy.foreign_paths import ADVICE, advice


def test_short_flags_of_llama_cpp_are_taken() -> None:
    words = ["-m", "x.gguf", "-c", "4096", "-a", "name", "-b", "256", "-ctk", "q8_0", "-ctv", "q8_0", "--port", "1"]
    assert arguments.parse(words).flags == {
        "model": "x.gguf",
        "ctx-size": "4096",
        "alias": "name",
        "batch-size": "256",
        "cache-type-k": "q8_0",
        "cache-type-v": "q8_0",
        "port": "1",
    }


@pytest.mark.parametrize("flag", ["--no-ui", "--no-webui"])
def test_the_page_is_turned_off_as_in_llama_server(flag: str) -> None:
    config = load(arguments.parse([flag]).flags, {})
    assert not config.server.has_page
    assert load({}, {}).server.has_page


@pytest.mark.parametrize("flag", ["-hf", "-hfr", "--hf-repo"])
def test_a_name_on_the_hub_is_taken_where_llama_server_takes_it(flag: str) -> None:
    """Found by use 21: the hint of -hf and that of --model led in a circle."""
    assert arguments.parse([flag, "owner/name-GGUF:Q8_0"]).flags == {"model": "owner/name-GGUF:Q8_0"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--n-gpu-layers=99"], "--gpu-layers"),
        (["-m", "x.gguf", "-cb"], "--conversation-cache-mib"),
        (["--cache-ram", "8192"], "--conversation-cache-mib"),
        (["--jinja"], "leave it out"),
        (["-m", "x.gguf", "-n", "512"], "--max-output-tokens"),
        (["-m", "owner/name", "-hff", "x.gguf"], "--model owner/name:Q4_K_M"),
        (["-m", "x.gguf", "-md", "y.gguf"], "--draft-tokens"),
        (["-m", "x.gguf", "-s", "42"], "each request"),
        (["-m", "x.gguf", "-f", "y"], "unknown flag -f"),
        (["--reasoning", "off"], "thinking_budget"),
        (["--context-shift"], "--ctx-size"),
        (["--kv-unified"], "one conversation runs at a time"),
        (["--webui"], "leave it out"),
        (["--model-url", "https://x.example/y.gguf"], "--model owner/name:Q4_K_M"),
        (["--no-slots"], "leave it out"),
        (["--log-file", "x.log"], "redirect"),
        (["--max-model-len", "4096"], "--ctx-size"),
        (["--tensor-parallel-size=2"], "--devices cuda:0,cuda:1"),
        (["--served-model-name", "x"], "--alias"),
        (["my.gguf"], "parkd --model my.gguf"),
        (["owner/name"], "parkd --model owner/name"),
        (["-c4096"], "unknown flag -c4096"),
        (["help"], "--help"),
        (["run", "llama3"], "--model"),
        (["pull", "llama3"], "--model"),
        (["serve", "x.gguf"], "named with --model"),
    ],
)
def test_flags_and_commands_of_others_name_their_like_here(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert hint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "shown", "hidden"), [("plan", "--ctx-size", "--port"), ("demo", "-m", "--api-key")]
)
def test_the_help_of_a_command_shows_what_it_reads(
    command: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by use 24: it printed the server's flags."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: parkd {command} ")
    assert shown in said
    assert hidden not in said
    assert arguments.parse([command, "--port", "9", "-c", "4096"]).flags == {"port": "9", "ctx-size": "4096"}


def test_no_flag_is_both_ours_and_anothers() -> None:
    ours = {f"--{setting.name}" for setting in arguments.SETTINGS}
    ours |= {short for setting in arguments.SETTINGS for short in setting.short}
    assert not ours & set(arguments.FOREIGN_FLAGS)
    assert not set(arguments.COMMANDS) & set(arguments.FOREIGN_COMMANDS)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/embeddings", "POST /v1/embeddings"),
        ("/v1/audio/speech", "another one beside it"),
        ("/v1/v1/messages", "one /v1 too many"),
        ("/messages", "POST /v1/messages"),
        ("/api/delete", "--model"),
        ("/slots/0", "by themselves"),
        ("/v1/responses/resp_1", "whole history"),
        ("/nothing", "POST /v1/chat/completions"),
    ],
)
def test_unknown_paths_are_answered_with_what_does_the_same(path: str, hint: str) -> None:
    assert hint in advice(path)
    assert all(not known.endswith("/") for known in ADVICE)
