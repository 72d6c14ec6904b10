"""The settings: what a user may choose, where it is read from, and what is refused.

    flag  >  PARKD_* in the environment  >  the TOML file (--config)  >  default

All four go through the same parser, so a value means the same wherever it stands. `reading.py` is the only module that
reads the environment. Whatever is wrong raises ConfigError, which names the place and says what to do.
"""

from parkd.config.parsers import EVICTION_POLICIES, MIB
from parkd.config.reading import LEDGER_NAME, load, nearest, server_address
from parkd.config.settings import ENV_PREFIX, SETTINGS, Setting, default_of
from parkd.config.values import (
    CacheConfig,
    Config,
    Deadlines,
    DiskCacheConfig,
    LlamaSettings,
    ModelConfig,
    ProxyConfig,
    RemoteConfig,
    UpstreamConfig,
)

__all__ = [
    "ENV_PREFIX",
    "EVICTION_POLICIES",
    "LEDGER_NAME",
    "MIB",
    "SETTINGS",
    "CacheConfig",
    "Config",
    "Deadlines",
    "DiskCacheConfig",
    "LlamaSettings",
    "ModelConfig",
    "ProxyConfig",
    "RemoteConfig",
    "Setting",
    "UpstreamConfig",
    "default_of",
    "load",
    "nearest",
    "server_address",
]
