"""Models by their names on the hub, as users of llama-server and Ollama write them: `owner/name`, `owner/name:Q4_K_M`.

A repository with safetensors is a model directory, and the engine downloads what it needs of it. A repository with GGUF
files has one for each quantisation: one is chosen here and downloaded, with all parts if it is split.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parkd.errors import ConfigError

log = logging.getLogger("parkd.hub")

DEFAULT_QUANTISATION = "Q4_K_M"
"""What llama-server takes if none is named."""
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<quantisation>[\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """`owner/name`, and the quantisation if one is named."""

    repository: str
    quantisation: str | None


def hub_name(model: str) -> HubName | None:
    """None if this is not a name on the hub."""
    found = _NAME.fullmatch(model)
    return None if found is None else HubName(found["repository"], found["quantisation"])


def choose_gguf(files: Sequence[str], quantisation: str | None) -> tuple[str, ...]:
    """The GGUF file of this quantisation, first part first; empty if there is none. Without a quantisation: the one
    that llama-server takes, else the first. Projectors of images (`mmproj`) are no models."""
    models = sorted(name for name in files if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    first_parts = [name for name in models if (part := _PART.search(name)) is None or int(part[1]) == 1]
    wanted = quantisation or DEFAULT_QUANTISATION
    pattern = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
    chosen = next((name for name in first_parts if pattern.search(name)), None)
    if chosen is None and quantisation is None:
        chosen = next(iter(first_parts), None)
    if chosen is None:
        return ()
    stem = _PART.sub("", chosen)
    return tuple(name for name in models if name == chosen or (_PART.search(name) and _PART.sub("", name) == stem))


def quantisations(files: Sequence[str]) -> tuple[str, ...]:
    """The names of the GGUF files, a split one once, for a message."""
    return tuple(sorted({_PART.sub(".gguf", name) for name in files if name.lower().endswith(".gguf")}))


def fetch_gguf(
    name: HubName,
    list_files: Callable[[str], Sequence[str]] | None = None,
    download: Callable[[str, str], str] | None = None,
) -> str | None:
    """Downloads the repository's GGUF file and returns its path; None if the repository is a model directory.

    `list_files` and `download` are the hub's, and return what was downloaded before if the hub cannot be reached.
    Raises ConfigError if the repository has no such file, or cannot be reached and nothing of it was downloaded before.
    """
    files = (list_files or _list_files)(name.repository)
    if name.quantisation is None and "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return None
    chosen = choose_gguf(files, name.quantisation)
    if not chosen:
        known = quantisations(files)
        if name.quantisation is None and not known:
            return None  # the engine says what it lacks
        there = f"it has {', '.join(known)}" if known else "it has no GGUF files"
        raise ConfigError(f"--model {name.repository}:{name.quantisation}: there is no such quantisation; {there}")
    for file in chosen:
        log.info("fetching %s of %s (only what was not downloaded before)", file, name.repository)
    paths = [(download or _download)(name.repository, file) for file in chosen]
    return paths[0]


def _list_files(repository: str) -> Sequence[str]:
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, RepositoryNotFoundError

    try:
        return [entry.rfilename for entry in HfApi().model_info(repository).siblings or ()]
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"--model {repository}: there is no such model on the hub, or it asks for a token (set HF_TOKEN)"
        ) from error
    except _hub_errors() as error:
        try:
            known = next((repo for repo in scan_cache_dir().repos if repo.repo_id == repository), None)
        except CacheNotFound:
            known = None
        files = sorted({file.file_name for revision in known.revisions for file in revision.files}) if known else []
        if not files:
            raise ConfigError(
                f"--model {repository}: there is no such directory, the hub cannot be reached, and nothing of such a "
                f"model was downloaded before: {error}"
            ) from error
        return files


def _download(repository: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(repository, file)
    except _hub_errors() as error:
        raise ConfigError(f"--model {repository}: {file} cannot be downloaded: {error}") from error


def _hub_errors() -> tuple[type[Exception], ...]:
    """What the hub's library raises: its own error, and the errors of connections, whose class is the base of its own
    and belongs to httpx or httpx2, by the library's version."""
    from huggingface_hub.errors import HfHubHTTPError

    return (HfHubHTTPError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), OSError)
