"""Who computes state in a vLLM process, and what the bytes of a chunk are."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from parkd.errors import ConfigError, ModelError
from parkd.model_files.cache import ModelCache, Progress
from parkd_tier.identity import Facts, Identity
from parkd_tier.weights import weights_digest

_SHAPELESS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a model's configuration that change no value of its state. Every other is assumed to."""


def identity_of(config: Any, spec: Any, chunk_bytes: int, cache_folder: Path, progress: Progress | None) -> Identity:
    """`config`: vLLM's `VllmConfig`; `spec`: its `OffloadingSpec`. Reads all weights the first time. Raises
    ConfigError if they cannot be found."""
    return Identity(_model(config, cache_folder, progress), _rows(config, spec, chunk_bytes))


def _model(config: Any, cache_folder: Path, progress: Progress | None) -> Facts:
    import torch
    import vllm

    model = config.model_config
    facts = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": _device(),
        "weights": _weights(model.model, model.revision, config.load_config.load_format, cache_folder, progress),
        "model's configuration": _configuration(model.hf_config),
        "compute dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "processing of media": str(getattr(model.multimodal_config, "mm_processor_kwargs", None)),
        "prefix hash": config.cache_config.prefix_caching_hash_algo,
        "attention": str(getattr(config.attention_config, "backend", None)),
    }
    speculative = config.speculative_config
    if speculative is not None:
        draft = getattr(speculative, "draft_model_config", None)
        facts["speculative decoding"] = f"{speculative.method}, {speculative.num_speculative_tokens} tokens"
        if draft is not None and draft.model != model.model:
            facts["draft weights"] = _weights(
                draft.model, draft.revision, config.load_config.load_format, cache_folder, progress
            )
    return facts


def _rows(config: Any, spec: Any, chunk_bytes: int) -> Facts:
    parallel, cache = spec.config.parallel, spec.config.cache
    return {
        "chunk bytes": chunk_bytes,
        "tokens in a hash": cache.tokens_per_hash,
        "blocks in a chunk": cache.blocks_per_chunk,
        "groups of layers": [[group.tokens_per_block, list(group.layer_names)] for group in spec.config.groups],
        "dtype of keys and values": spec.config.model.dtype,
        "layout of the cache": str(spec.config.kv_cache_layout),
        "canonical layout": spec.config.canonical_layout,
        "replicated layout": spec.config.replicated_layout,
        "tensor parallel size": parallel.tp_size,
        "pipeline parallel size": parallel.pp_size,
        "prefill context parallel size": parallel.pcp_size,
        "decode context parallel size": parallel.dcp_size,
        "state of recurrent layers": [
            str(getattr(config.cache_config, name, None)) for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
        ],
    }


def _weights(model: str, revision: str | None, load_format: Any, cache_folder: Path, progress: Progress | None) -> str:
    if str(load_format) == "dummy":
        return "dummy"  # vLLM makes them up, always in the same way
    try:
        cache = ModelCache(cache_folder)
    except ModelError as error:
        raise ConfigError(error.message) from error
    return weights_digest(_folder(model, revision), cache, progress)


def _folder(model: str, revision: str | None) -> Path:
    """Where a model's files are, if it is named as on a hub."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ConfigError(
            f"parkd-tier cannot find the files of {model}, so it cannot tell which weights state belongs to: give vLLM "
            f"the folder that has them ({error})"
        ) from error


def _configuration(settings: Any) -> str:
    known = {name: value for name, value in settings.to_dict().items() if name not in _SHAPELESS}
    return blake2b(repr(_sorted(known)).encode(), digest_size=16).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(name), _sorted(inner)) for name, inner in value.items() if name not in _SHAPELESS)
    return [_sorted(inner) for inner in value] if isinstance(value, (list, tuple)) else str(value)


def _device() -> str:
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception:  # a platform that does not tell
        return str(current_platform.device_type)
