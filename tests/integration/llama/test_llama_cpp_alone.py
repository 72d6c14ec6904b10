"""A GGUF file on llama.cpp without torch: neither needed, nor imported where it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

from tests.integration.llama.test_llama_cpp_adapters import write_vector
from tests.integration.llama.tiny_gguf import write_tiny_hybrid
from tests.packaging.installed_kit import ROOT, chat, command, environment, serving, variables

MESSAGES = [{"role": "user", "content": "Tell me of the sea, and of what swims in it. " * 12}]
OTHER = [{"role": "user", "content": "And of the mountains? " * 12}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install parkd[llama-cpp]` installs."""
    site = environment(tmp_path_factory.mktemp("alone") / "site", "llama-cpp")
    assert not {"torch", "transformers", "tokenizers", "accelerate"} & {path.name for path in site.iterdir()}
    return site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_hybrid(path)
    return path


def test_it_serves_parks_and_restores_with_what_its_extra_installs(alone: Path, model: Path, tmp_path: Path) -> None:
    vector = write_vector(tmp_path / "v.gguf", 1)
    words = ["--model", str(model), "--ctx-size", "2048", "--conversation-cache-mib", "64", "--threads", "1"]
    words += ["--control-vector", str(vector), "--port", "0"]
    with serving(command("serve", *words), variables(str(alone), tmp_path), tmp_path) as server:
        answer, cache = chat(server.url, MESSAGES)
        assert (cache, chat(server.url, OTHER)[1]) == ("cold", "cold")
        assert chat(server.url, MESSAGES) == (answer, "restored-ram")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        told, _ = chat(server.url, OTHER, response_format=form, max_tokens=40, temperature=1.0, seed=3)
        assert told.startswith("{")
        assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()


def test_a_server_beside_torch_does_not_import_it(model: Path, tmp_path: Path) -> None:
    env = variables(f"{ROOT}:{ROOT / 'engine'}", tmp_path)
    words = ["--model", str(model), "--ctx-size", "1024", "--conversation-cache-mib", "64", "--port", "0"]
    with serving([sys.executable, "-m", "parkd", *words], env, tmp_path) as server:
        assert chat(server.url, MESSAGES)[1] == "cold"
        assert "libllama" in (maps := Path(f"/proc/{server.pid}/maps").read_text())
        assert "libtorch" not in maps


def test_the_plan_of_a_gguf_file_needs_no_torch(alone: Path, model: Path, tmp_path: Path) -> None:
    run = command("plan", "--model", str(model))
    env = variables(str(alone), tmp_path)
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "engine    llama.cpp" in done.stdout


def test_bindings_without_an_installers_notes_are_enough(alone: Path, model: Path, tmp_path: Path) -> None:
    """Copied beside a library that was built elsewhere, they have no `.dist-info`: loading asked for their version."""
    site = tmp_path / "site"
    site.mkdir()
    for part in alone.iterdir():
        if not part.name.startswith("llama_cpp_python"):
            (site / part.name).symlink_to(part)
    words = ["--model", str(model), "--ctx-size", "512", "--conversation-cache-mib", "64", "--port", "0"]
    with serving(command("serve", *words), variables(str(site), tmp_path), tmp_path) as server:
        assert chat(server.url, [{"role": "user", "content": "a"}])[1] == "cold"
