"""llama.cpp's library as somebody else built it: taken where it fits, under another name too, and refused by name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from parkd.engine_adapter.llama_cpp.existing import inspect, refusal
from tests.integration.llama.tiny_gguf import write_tiny_dense
from tests.packaging.installed_kit import chat, command, environment, serving, variables

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

OWN = Path(llama_cpp.__file__).parent / "lib"
MESSAGES = [{"role": "user", "content": "Tell me of the sea, and of what swims in it. " * 12}]
OTHER = [{"role": "user", "content": "And of the mountains? " * 12}]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The library that the tests have, in another folder and under another name."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for path in OWN.iterdir():
        if not path.name.startswith(("libllama", "libmtmd")):
            shutil.copy(path, folder / path.name, follow_symlinks=False)
    shutil.copy((OWN / "libllama.so").resolve(), folder / "libllama.cpu.v0.5.0.so")
    return folder


@pytest.fixture
def without_library(tmp_path: Path) -> Path:
    """What pip installs, but bindings that were not compiled."""
    site = environment(tmp_path / "site", "llama-cpp")
    (site / "llama_cpp").unlink()
    (site / "llama_cpp").mkdir()
    for path in Path(llama_cpp.__file__).parent.iterdir():
        if path.name != "lib":
            (site / "llama_cpp" / path.name).symlink_to(path)
    return site


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_dense(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_the_parameters_of_the_library_that_the_bindings_were_built_with_have_their_size() -> None:
    seen = inspect((OWN / "libllama.so").resolve())
    assert seen.sizes is None or all(its == ours > 60 for its, ours in seen.sizes.values())
    assert refusal(seen) is None


def test_bindings_without_a_library_serve_over_one_that_is_named(
    without_library: Path, elsewhere: Path, model: Path, tmp_path: Path
) -> None:
    env = variables(str(without_library), tmp_path)
    words = ["--model", str(model), "--ctx-size", "2048", "--conversation-cache-mib", "64", "--port", "0"]
    with serving(command("serve", *words, "--llama-lib", str(elsewhere)), env, tmp_path) as server:
        answer, cache = chat(server.url, MESSAGES)
        assert (cache, chat(server.url, OTHER)[1]) == ("cold", "cold")
        assert chat(server.url, MESSAGES) == (answer, "restored-ram")
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert str(elsewhere / "libllama.cpu.v0.5.0.so") in maps
        assert str(OWN) not in maps


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            'const char *ggml_version(void) { return "0.9.11"; }',
            "it is of ggml 0.9.11, and",
        ),
        (
            'const char *ggml_version(void) { return "0.25.2"; }',
            "it has no llama_adapter_get_alora_n_invocation_tokens, llama_adapter_lora_init, ",
        ),
        ("int other;", "it cannot be loaded: AttributeError"),
        (
            "__attribute__((constructor)) static void end(void) { __builtin_trap(); }",
            "it cannot be loaded: the process ended with -",
        ),
    ],
)
def test_a_library_that_does_not_fit_is_refused_before_it_is_used(
    source: str, reason: str, model: Path, without_library: Path, tmp_path: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    (tmp_path / "lib.c").write_text(source)
    library = tmp_path / "libllama.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "lib.c"], check=True)
    run = command("serve", "--model", str(model), "--llama-lib", str(library), "--port", "0")
    env = variables(str(without_library), tmp_path)
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"--llama-lib {library} cannot be used: {reason}" in done.stderr


def test_without_any_library_it_says_how_to_name_one(without_library: Path, model: Path, tmp_path: Path) -> None:
    run = command("serve", "--model", str(model), "--port", "0")
    env = variables(str(without_library), tmp_path)
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no library of its own here: name one with --llama-lib PATH" in done.stderr
