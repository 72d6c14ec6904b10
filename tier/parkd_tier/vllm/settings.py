"""The operator's settings: from the budget to vLLM's `--kv-transfer-config`, and from that to values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkd.errors import ConfigError
from parkd.store.budget import MIB
from parkd.store.chunks import ChunkOptions

CONNECTOR = "ParkdConnector"
CONNECTOR_MODULE = "parkd_tier.vllm.connector"
SPEC = "ParkdSpec"
SPEC_MODULE = "parkd_tier.vllm.spec"
TIER = "ParkdTier"
TIER_MODULE = "parkd_tier.vllm.manager"
INDEX_SHARE = 32
"""What describes the disk takes at most one part in this many of the memory budget."""
WAITING_SHARE = 2
"""What waits for its write holds at most one part in this many of vLLM's tier in memory."""
GIB = 1 << 30
DEFAULT_WRITE_GIB_PER_DAY = 200
_NAMES = frozenset({"directory", "disk_mib", "index_mib", "write_gib_per_day", "cache_directory", "canary"})


@dataclass(frozen=True)
class TierSettings:
    directory: Path
    disk_bytes: int
    index_bytes: int
    write_bytes_per_day: int
    cache_directory: Path
    """Keeps digests of weight files."""
    needs_canary: bool
    """Nothing is restored before a canary has passed."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> TierSettings:
        """Of the tier's entry in the configuration, without `type` and `module_path`. Raises ConfigError."""
        unknown = sorted(set(values) - _NAMES)
        if unknown:
            raise ConfigError(
                f"parkd-tier does not know the setting {unknown[0]!r}: it has {', '.join(sorted(_NAMES))}"
            )
        directory = values.get("directory")
        if not isinstance(directory, str) or not directory:
            raise ConfigError("parkd-tier needs the setting 'directory': where state is kept")
        return TierSettings(
            Path(directory).expanduser(),
            _whole(values, "disk_mib", None) * MIB,
            _whole(values, "index_mib", 64) * MIB,
            _whole(values, "write_gib_per_day", DEFAULT_WRITE_GIB_PER_DAY) * GIB,
            Path(values.get("cache_directory") or "~/.cache/parkd").expanduser(),
            values.get("canary") is not False,
        )

    def replica_directory(self, parallel: Any) -> Path:
        """Of one engine: each data parallel replica (vLLM's `OffloadingParallelConfig`) has a directory and budgets of
        its own."""
        if parallel.data_parallel_size == 1:
            return self.directory
        return self.directory / f"replica-{parallel.data_parallel_index}"

    def options(self, memory_bytes: int) -> ChunkOptions:
        """For a tier under so much of vLLM's memory."""
        return ChunkOptions(self.disk_bytes, self.index_bytes, self.write_bytes_per_day, memory_bytes // WAITING_SHARE)


def _whole(values: Mapping[str, Any], name: str, default: int | None) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"parkd-tier needs a whole number above 0 for {name!r}, not {value!r}")
    return value


def transfer_config(
    directory: Path,
    ram_bytes: int,
    disk_bytes: int,
    chunk_tokens: int | None,
    write_gib_per_day: int,
    *,
    needs_canary: bool = True,
) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for a budget of memory and one of disk, whole MiB each. Raises ConfigError."""
    index_bytes = max(MIB, ram_bytes // INDEX_SHARE // MIB * MIB)
    if ram_bytes <= index_bytes or disk_bytes < MIB:
        raise ConfigError("parkd-tier needs at least 2 MiB of memory and 1 MiB of disk")
    extra: dict[str, Any] = {
        "spec_name": SPEC,
        "spec_module_path": SPEC_MODULE,
        "cpu_bytes_to_use": ram_bytes - index_bytes,
        "offload_prompt_only": False,  # an answer is part of the next prompt
        "secondary_tiers": [
            {
                "type": TIER,
                "module_path": TIER_MODULE,
                "directory": str(directory),
                "disk_mib": disk_bytes // MIB,
                "index_mib": index_bytes // MIB,
                "write_gib_per_day": write_gib_per_day,
                "canary": needs_canary,
            }
        ],
    }
    if chunk_tokens is not None:
        extra["block_size"] = chunk_tokens
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
