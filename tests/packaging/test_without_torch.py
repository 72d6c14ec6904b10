"""parkd without torch: before a llama-server it needs only its own requirements, and what needs torch says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.installed_kit import ROOT, chat, command, environment, llama_server, serving, variables

IMPORT_ALL = """
import importlib, pkgutil, parkd
names = [module.name for module in pkgutil.walk_packages(parkd.__path__, "parkd.")]
others = ("parkd.engine_adapter.torch_engine", "parkd.engine_adapter.llama_cpp")
for name in names:
    if not name.startswith(others) and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install parkd` installs."""
    return environment(tmp_path_factory.mktemp("bare") / "site")


def test_the_main_install_names_no_torch_and_has_all_that_it_imports(bare: Path, tmp_path: Path) -> None:
    assert {"torch", "transformers", "accelerate", "llama_cpp"} & {path.name for path in bare.iterdir()} == set()
    run = [sys.executable, "-S", "-c", IMPORT_ALL]
    done = subprocess.run(run, env=variables(str(bare), tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


def test_it_serves_before_a_llama_server(bare: Path, tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    with llama_server(slots) as upstream:
        words = ["--upstream", upstream, "--slot-save-path", str(slots), "--conversation-cache-disk-mib", "8"]
        with serving(command("serve", *words, "--port", "0"), variables(str(bare), tmp_path), tmp_path) as server:
            messages = [{"role": "user", "content": "Some words that are long enough to be worth keeping. " * 8}]
            answer, cache = chat(server.url, messages)
            other = [{"role": "user", "content": "Others, which are somebody else's."}]
            assert (cache, chat(server.url, other)[1]) == ("cold", "cold")
            assert chat(server.url, messages) == (answer, "restored-disk")


def test_a_server_of_this_environment_maps_no_torch_either(tmp_path: Path) -> None:
    """Where torch is installed, it is not imported for a llama-server."""
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    with llama_server(slots) as upstream:
        words = ["--upstream", upstream, "--slot-save-path", str(slots), "--conversation-cache-disk-mib", "8"]
        env = variables(f"{ROOT}:{ROOT / 'engine'}", tmp_path)
        with serving([sys.executable, "-m", "parkd", *words, "--port", "0"], env, tmp_path) as server:
            assert chat(server.url, [{"role": "user", "content": "a"}])[1] == "cold"
            assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "random:tiny-llama"), "torch is not installed, and this model runs on it"),
        (("plan", "--model", "random:tiny-llama"), "pip install 'parkd[torch]'"),
        (("--model", "m.gguf"), "since llama.cpp is not installed: pip install llama-cpp-python"),
        (("--model", "m.gguf", "--engine", "torch"), "since --engine names it. For torch: pip install 'parkd[torch]'"),
        (("canary", "--model", "random:tiny-llama"), "torch is not installed"),
    ],
)
def test_a_model_that_needs_torch_says_how_to_get_it(
    bare: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    env = variables(str(bare), tmp_path)
    done = subprocess.run(command(*words), cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
