"""Finds a model's files and loads them: a Hugging Face directory, a hub id, a GGUF file or `random:NAME`.

The configuration is read and checked before any weights. Nothing is unpickled, and no code that comes with a model is
run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from parkd.errors import ModelError, UnsupportedModel
from parkd.model_files.cache import DIGEST_BYTES, ModelCache, Progress
from parkd.words.templates import ChatTemplate
from parkd_engine.families.architectures import check_config
from parkd_engine.families.layer_state import draft_layers
from parkd_engine.families.multimodal import language_config, model_class
from parkd_engine.families.presets.heads import layer_gain, random_head
from parkd_engine.families.presets.shapes import PREFIX, preset_config
from parkd_engine.families.presets.weights import layer_placement, preset_digest, random_model
from parkd_engine.families.presets.words import preset_processor, preset_tokenizer
from parkd_engine.families.records import vision_of
from parkd_engine.kernels import has_triton, keep_tuning
from parkd_engine.loading import gguf_convert
from parkd_engine.loading.draft_loading import drop_head, find_head, load_head
from parkd_engine.loading.library_bars import no_library_bars
from parkd_engine.loading.model_words import (
    HUB_ID,
    SMALL_FILES,
    downloaded,
    end_token_ids,
    load_tokenizer,
    template_source,
)
from parkd_engine.loading.quantised_loading import convert_folder, load_quantised
from parkd_engine.vision.images import ImageProcessor, image_tokens, processor_class
from parkd_engine.weights.schemes import OWN_VERSION, convert_to, scheme_of
from parkd_engine.words.chat import ChatTokenizer

WEIGHT_FILES = ("*.safetensors",)
MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says how weights are quantised; some of its versions say it nowhere else."""
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LoadConfig:
    """What to load, and where to keep converted files."""

    model: str
    """Directory, hub id, GGUF file or `random:NAME`."""
    cache_dir: Path
    chat_template_file: Path | None = None
    """Replaces the model's own template."""
    dtype: torch.dtype | None = None
    """The compute dtype. None means float32 on CPU and the checkpoint's own dtype on GPU."""
    draft: bool = True
    """Whether to load the model's draft head, if it has one."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices of all stages. Weights are loaded to main memory; random ones are drawn on the GPU."""
    weights: str | None = None
    """The kind to which weights in full precision are converted, one of `weights.schemes.OWN_KINDS`; None: none."""
    split: Callable[[Any, torch.dtype], Ranges] | None = None
    """(the library's configuration, compute dtype) -> the stages' layer ranges. Called before weights are read. None:
    one stage."""
    host_layers: Callable[[], Collection[int]] = tuple
    """The layers whose routed experts stay in main memory; asked behind `split`. Only random weights need to know."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, with all that is needed to turn messages into ids and ids into text."""

    name: str
    config: Any
    """The library's configuration."""
    model: Any
    """The library's causal language model, in evaluation mode."""
    draft_model: Any
    """Its draft head, an `MtpModel` of the library, which `config` then names. None without one or if not wanted."""
    tokenizer: ChatTokenizer
    template: ChatTemplate
    dtype: torch.dtype
    weights_digest: bytes
    """16 bytes over the content of the weight files, or over the recipe of random weights."""
    end_token_ids: frozenset[int]
    ranges: Ranges
    """Layers `[first, end)` of each stage."""
    images: ImageProcessor | None = None
    """None: the model reads text only."""

    @property
    def text_config(self) -> Any:
        """The text part of the configuration."""
        return language_config(self.config)


def load_model(config: LoadConfig, progress: Progress | None = None) -> LoadedModel:
    """Loads `config.model`. Raises UnsupportedModel (before weights are read) or ModelError."""
    if has_triton():
        keep_tuning()  # Before the library imports kernels with the model's code.
    template = template_source(config.chat_template_file)
    if config.model.startswith(PREFIX):
        return _load_preset(config, template)
    path = Path(config.model).expanduser()
    cache = ModelCache(config.cache_dir)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file but not a GGUF file; name a .gguf file or a model directory.")
        folder, digest = _converted(path, config, cache, progress)
        folder, digest = _of_kind(folder, digest, config, cache, progress)
        return _load_folder(path.stem, folder, config, template, digest, progress)
    if path.is_dir():
        folder = path
        checked_config(folder)
    elif HUB_ID.fullmatch(config.model):
        folder = _downloaded(config.model)
    else:
        raise ModelError(f"{config.model} is neither a directory, a GGUF file nor a hub id such as owner/name.")
    digest = _directory_digest(folder, cache, progress)
    folder, digest = _of_kind(folder, digest, config, cache, progress)
    return _load_folder(path.name, folder, config, template, digest, progress)


def _load_folder(
    name: str, folder: Path, config: LoadConfig, template: str | None, digest: bytes, progress: Progress | None
) -> LoadedModel:
    settings = checked_config(folder)
    has_head = config.draft and find_head(folder, settings)
    tokenizer = load_tokenizer(folder)
    if progress is not None:
        progress(f"Loading {name}", 0.0)
    dtype = _compute_dtype(config, settings)
    images = _image_processor(folder, settings, tokenizer)
    kind = model_class(settings)
    ranges = _ranges(config, settings, dtype)
    scheme = scheme_of(settings)
    files: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    try:
        with no_library_bars():
            if scheme is None:
                model = kind.from_pretrained(str(folder), config=settings, dtype=dtype, **files)
            else:
                model = load_quantised(kind, folder, settings, scheme, dtype=dtype, **files)
        model.eval()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"The weights in {folder} cannot be loaded: {error}") from error
    draft_model = load_head(model, folder) if has_head else None
    if progress is not None:
        progress(f"Loading {name}", 1.0)
    return LoadedModel(
        name=name,
        config=settings,
        model=model,
        draft_model=draft_model,
        tokenizer=ChatTokenizer(tokenizer, declares=template is None),
        template=ChatTemplate(tokenizer, template),
        dtype=dtype,
        weights_digest=digest,
        end_token_ids=end_token_ids(folder, language_config(settings), tokenizer),
        images=images,
        ranges=ranges,
    )


def _load_preset(config: LoadConfig, template: str | None) -> LoadedModel:
    settings = preset_config(config.model)
    if not config.draft:
        drop_head(settings)
    check_config(settings)
    if config.weights is not None:
        convert_to(settings, config.weights)
    device = torch.device(config.devices[0])
    dtype = config.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokenizer = preset_tokenizer(settings)
    processor = preset_processor(config.model, settings)
    images = None if processor is None else ImageProcessor(processor, settings, image_tokens(settings, tokenizer))
    ranges = _ranges(config, settings, dtype)
    hosted = config.host_layers()
    is_divided = (len(ranges) > 1 or hosted) and device.type != "cpu"
    place = layer_placement(ranges, config.devices, hosted) if is_divided else None
    model = random_model(settings, dtype, device, layer_gain(config.model), place)
    return LoadedModel(
        name=config.model,
        config=settings,
        model=model,
        draft_model=random_head(model, config.model) if draft_layers(language_config(settings)) else None,
        tokenizer=ChatTokenizer(tokenizer, declares=template is None),
        template=ChatTemplate(tokenizer, template),
        dtype=dtype,
        weights_digest=preset_digest(config.model, dtype, device, config.weights),
        end_token_ids=frozenset({language_config(settings).eos_token_id}),
        images=images,
        ranges=ranges,
    )


def _ranges(config: LoadConfig, settings: Any, dtype: torch.dtype) -> Ranges:
    if config.split is None:
        return ((0, int(language_config(settings).num_hidden_layers)),)
    return config.split(settings, dtype)


def _converted(path: Path, config: LoadConfig, cache: ModelCache, progress: Progress | None) -> tuple[Path, bytes]:
    """The folder converted from a GGUF file, now or earlier, and the digest of its content."""
    dtype = config.dtype or (torch.float32 if torch.device(config.devices[0]).type == "cpu" else torch.bfloat16)
    source = cache.file_digest(path, progress)
    recipe = f"{source.hex()} {gguf_convert.CONVERSION_VERSION} {dtype}"
    digest = blake2b(recipe.encode(), digest_size=DIGEST_BYTES).digest()
    folder = cache.converted(digest.hex(), lambda part: gguf_convert.convert(path, part, dtype, progress), progress)
    return folder, digest


def _of_kind(
    folder: Path, digest: bytes, config: LoadConfig, cache: ModelCache, progress: Progress | None
) -> tuple[Path, bytes]:
    """The folder, or its copy of the kind of weights that is asked for, converted now or earlier, and the digest of
    what is loaded. Raises ModelError."""
    if config.weights is None:
        return folder, digest
    settings, weights = checked_config(folder), config.weights
    convert_to(settings, weights)
    recipe = f"{digest.hex()} weights {OWN_VERSION} {weights}"
    whole = blake2b(recipe.encode(), digest_size=DIGEST_BYTES).digest()
    return cache.converted(whole.hex(), lambda part: convert_folder(folder, part, settings, progress), progress), whole


def _downloaded(hub_id: str) -> Path:
    """Downloads a hub model and returns its folder. Weights are downloaded only if the configuration is supported."""
    checked_config(downloaded(hub_id, SMALL_FILES))
    return downloaded(hub_id, [*SMALL_FILES, *WEIGHT_FILES])


def checked_config(folder: Path) -> Any:
    """The configuration in `folder`, if the engine runs it. Raises ModelError and UnsupportedModel."""
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" Name one of its GGUF files: {', '.join(files)}." if files else ""
        raise ModelError(f"{folder} contains no config.json, so it is not a model directory.{hint}")
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            raise UnsupportedModel(
                f"{folder} is a model of the kind {kind!r}, which transformers {transformers.__version__} does not know"
            )
        settings = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        if getattr(settings, "quantization_config", None) is None and (folder / MODELOPT_FILE).is_file():
            told = json.loads((folder / MODELOPT_FILE).read_text(encoding="utf-8"))["quantization"]
            if told.get("quant_algo"):  # Else only keys and values are meant.
                settings.quantization_config = {"quant_method": "modelopt", **told}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"The configuration in {folder} cannot be read: {error}") from error
    check_config(settings)
    return settings


def _image_processor(folder: Path, settings: Any, tokenizer: Any) -> ImageProcessor | None:
    """The image processor of the model in `folder`; None if it reads text only. Raises ModelError."""
    if vision_of(settings) is None:
        return None
    try:
        processor = processor_class(settings).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder} is a model that reads images, but its image processor cannot be loaded: {error} Add the "
            f"preprocessor_config.json that was published with the model."
        ) from error
    return ImageProcessor(processor, settings, image_tokens(settings, tokenizer))


def _directory_digest(folder: Path, cache: ModelCache, progress: Progress | None) -> bytes:
    """16 bytes over names and content of the weight files. Raises ModelError if there are no safetensors files."""
    files = sorted(folder.glob(WEIGHT_FILES[0]))
    if not files:
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
        if pickled:
            raise ModelError(
                f"{folder} has its weights in {', '.join(pickled)}. Such files can run code when they are opened and "
                f"are never loaded; convert them to safetensors, or download a version that has them."
            )
        raise ModelError(f"{folder} contains no weights (*.safetensors).")
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        hasher.update(file.name.encode() + b"\0" + cache.file_digest(file, progress))
    return hasher.digest()


def _compute_dtype(config: LoadConfig, settings: Any) -> torch.dtype:
    if config.dtype is not None:
        return config.dtype
    # CPUs without bf16 instructions are three times slower in bf16, so the CPU always computes in float32.
    own = getattr(settings, "dtype", None)
    if torch.device(config.devices[0]).type == "cpu":
        return torch.float32
    return own if isinstance(own, torch.dtype) else torch.bfloat16
