"""What of vLLM is known to work with parkd-tier. Everything else is refused at the start, with a sentence."""

from __future__ import annotations

import re
from typing import Any

from parkd.errors import ConfigError

TESTED = ((0, 32), (0, 33))
"""vLLM from the first version up to, and without, the second: those that the tests ran with."""
SAFE_HASHES = ("sha256", "sha256_cbor")
"""A key stands for all tokens before it, so two prompts must not have the same, not even on purpose."""


def check_version(version: str) -> None:
    """Raises ConfigError outside the tested range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    known = (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)
    if not TESTED[0] <= known < TESTED[1]:
        first, end = (".".join(map(str, each)) for each in TESTED)
        raise ConfigError(
            f"parkd-tier is tested with vLLM from {first} up to {end}, and this is {version or 'unknown'}: what vLLM "
            f"hands to it may mean something else there. Install a tested version, or leave parkd-tier out of "
            f"--kv-transfer-config"
        )


def check_config(config: Any) -> None:
    """Raises ConfigError for settings (a `VllmConfig`) under which a key would not say everything that shapes state."""
    if config.lora_config is not None:
        raise ConfigError(
            "parkd-tier does not run with --enable-lora: vLLM knows an adapter by its name alone, so state of an older "
            "adapter of that name would be used. Merge the adapter into the weights, or leave parkd-tier out"
        )
    cache = config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "parkd-tier does not run with --calculate-kv-scales: such scales are another process's at each start. "
            "Use a checkpoint that has its scales"
        )
    if not cache.enable_prefix_caching:
        raise ConfigError("parkd-tier needs vLLM's prefix caching: leave --no-enable-prefix-caching out")
    if cache.prefix_caching_hash_algo not in SAFE_HASHES:
        raise ConfigError(
            f"parkd-tier does not run with --prefix-caching-hash-algo {cache.prefix_caching_hash_algo}: two prompts "
            f"can be made that have the same hash. Use {' or '.join(SAFE_HASHES)}"
        )
