"""Names on the hub: which file of a repository is meant, and what is downloaded (found by use 21)."""

from __future__ import annotations

import huggingface_hub
import pytest

from parkd.cli.hub import HubName, choose_gguf, fetch_gguf, hub_name
from parkd.cli.model import on_disk
from parkd.errors import ConfigError

FILES = [
    "README.md",
    "config.json",
    "mmproj-model-Q4_K_M.gguf",
    "model-Q3_K_S.gguf",
    "model-Q4_K_M.gguf",
    "model-IQ4_K_M.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name", None)),
        ("owner/na.me-GGUF:Q4_K_M", HubName("owner/na.me-GGUF", "Q4_K_M")),
        ("random:qwen3-8b", None),
        ("a/b/c", None),
        ("name", None),
        ("owner/name:", None),
    ],
)
def test_a_name_is_owner_name_and_a_quantisation(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


@pytest.mark.parametrize(
    ("quantisation", "chosen"),
    [
        (None, ("model-Q4_K_M.gguf",)),
        ("q4_k_m", ("model-Q4_K_M.gguf",)),
        ("IQ4_K_M", ("model-IQ4_K_M.gguf",)),
        ("bf16", ("BF16/model-BF16-00001-of-00002.gguf", "BF16/model-BF16-00002-of-00002.gguf")),
        ("Q4_K", ()),
        ("Q8_0", ()),
    ],
)
def test_the_file_of_the_quantisation_is_chosen_with_all_its_parts(
    quantisation: str | None, chosen: tuple[str, ...]
) -> None:
    assert choose_gguf(FILES, quantisation) == chosen


def test_without_the_usual_quantisation_the_first_file_is_taken() -> None:
    assert choose_gguf(["b-Q8_0.gguf", "a-Q5_K_M.gguf", "mmproj-a.gguf"], None) == ("a-Q5_K_M.gguf",)
    assert choose_gguf(["mmproj-a.gguf", "config.json"], None) == ()


def test_all_parts_are_downloaded_and_the_first_is_the_model() -> None:
    asked: list[tuple[str, str]] = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return f"/hub/{file}"

    path = fetch_gguf(HubName("owner/name", "BF16"), lambda _: FILES, download)
    assert path == "/hub/BF16/model-BF16-00001-of-00002.gguf"
    assert asked == [("owner/name", name) for name in FILES if name.startswith("BF16")]


def test_a_directory_of_safetensors_is_left_to_the_engine() -> None:
    def never(*_: str) -> str:
        raise AssertionError("nothing is downloaded here")

    files = ["config.json", "model.safetensors", "model-Q4_K_M.gguf"]
    assert fetch_gguf(HubName("owner/name", None), lambda _: files, never) is None
    assert fetch_gguf(HubName("owner/name", None), lambda _: ["README.md"], never) is None


def test_a_quantisation_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"owner/name:Q8_0: .*BF16/model-BF16\.gguf, model-IQ4_K_M\.gguf"):
        fetch_gguf(HubName("owner/name", "Q8_0"), lambda _: [name for name in FILES if "mmproj" not in name])
    with pytest.raises(ConfigError, match="it has no GGUF files"):
        fetch_gguf(HubName("owner/name", "Q8_0"), lambda _: ["model.safetensors"])


def test_a_hub_out_of_reach_is_said_once_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object, repository: str) -> object:
        raise ConnectionError("no route to it")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ConfigError, match=r"owner/name-that-is-nowhere: .* the hub cannot be reached"):
        on_disk("owner/name-that-is-nowhere:Q4_0")
