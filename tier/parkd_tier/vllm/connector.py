"""The connector that vLLM is told to load: vLLM's own, after what must be known before memory is taken.

--kv-transfer-config "$(parkd-tier config --dir DIRECTORY --ram-mib N --disk-mib N)"
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from parkd.errors import ConfigError
from parkd.store.files.park_directory import open_directory
from parkd_tier.vllm.logs import show_logs
from parkd_tier.vllm.requirements import check_config, check_version
from parkd_tier.vllm.segments import replace_segment, segment_name
from parkd_tier.vllm.settings import TIER, TierSettings


class ParkdConnector(OffloadingConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError if state could not be told apart, or the directory cannot be used."""
        check_version(vllm.__version__)
        check_config(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            show_logs()
            _prepare(vllm_config, kv_cache_config)
        with set_current_vllm_config(vllm_config):  # the tier asks it whose state it keeps
            super().__init__(vllm_config, role, kv_cache_config)


_VLLMS = ("type", "module_path", "backpressure", "full_groups")
"""Entries of a tier's configuration that are not its settings."""


def _prepare(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Frees the memory that a killed process left, before vLLM takes its own."""
    config = build_offloading_config(vllm_config, kv_cache_config)
    entry = _entry(config.extra_config)
    settings = TierSettings.of({name: value for name, value in entry.items() if name not in _VLLMS})
    entry["full_groups"] = [
        group.group_id
        for group in config.groups
        if isinstance(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec, FullAttentionSpec)
    ]
    fs = open_directory(settings.replica_directory(config.parallel))
    try:
        replace_segment(fs, segment_name(config.engine_id))
    except OSError as error:
        raise ConfigError(f"{settings.directory} cannot be used: {error}") from error
    finally:
        fs.close()


def _entry(extra: Any) -> dict[str, Any]:
    tiers = [entry for entry in extra.get("secondary_tiers", []) if entry.get("type") == TIER]
    if len(tiers) != 1:
        raise ConfigError(
            f"ParkdConnector needs exactly one secondary tier of type {TIER}: take --kv-transfer-config from "
            f"parkd-tier config"
        )
    entry: dict[str, Any] = tiers[0]
    return entry
