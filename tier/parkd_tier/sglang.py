"""Behind SGLang's HiCache: `--hicache-storage-backend dynamic` with

    {"backend_name": "parkd", "module_path": "parkd_tier.sglang", "class_name": "ParkdStorage", "interface_v1": 1,
     "directory": DIRECTORY, "disk_mib": N}

A page of SGLang's pool in host memory is a chunk. Calls of SGLang's own threads wait for the disk here; each call is a
conversation up to its last page, since SGLang says which pages come before. Only pages of keys and values are kept: of
a model with more pools (recurrent state, windows) nothing is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from parkd.errors import ConfigError, ModelError
from parkd.model_files.cache import ModelCache
from parkd.state import Bytes
from parkd.store.budget import MIB
from parkd.store.chunks import Chunk, ChunkOptions
from parkd_tier.identity import Identity
from parkd_tier.opening import open_tier
from parkd_tier.tier import Loaded, Tier
from parkd_tier.weights import weights_digest

WAIT_S = 60.0
"""Longest wait of a call for the disk; then it has not found or kept anything."""
INDEX_BYTES = 64 * MIB
WRITE_BYTES_PER_DAY = 200 << 30
_Outcome = TypeVar("_Outcome")


class ParkdStorage(HiCacheStorage):
    def __init__(self, storage_config: HiCacheStorageConfig, arguments: Any = None) -> None:  # noqa: ARG002
        """Raises ConfigError if the weights cannot be found or the directory cannot be used."""
        extra = storage_config.extra_config or {}
        disk_mib, directory = extra.get("disk_mib"), extra.get("directory")
        if not isinstance(disk_mib, int) or disk_mib <= 0 or not isinstance(directory, str):
            raise ConfigError("parkd-tier needs 'directory' and a whole number of 'disk_mib' in SGLang's extra config")
        self._config = storage_config
        self._directory = Path(directory).expanduser()
        self._disk_bytes = disk_mib * MIB
        self._model = _model_facts(storage_config, Path(extra.get("cache_directory") or "~/.cache/parkd").expanduser())
        self._tier: Tier | None = None
        self._lock = threading.Condition()
        """SGLang reads on one thread and writes on another; a tier is for one."""
        self._numbers = count()
        self._ended: dict[int, Any] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        config = self._config
        rows = {
            "page bytes": page.numel() * page.element_size(),
            "dtype of keys and values": str(page.dtype),
            "layout of the pool": str(mem_pool_host.layout),
            "tokens of a page": int(mem_pool_host.page_size),
            "tensor parallel": [config.tp_rank, config.tp_size],
            "pipeline parallel": [config.pp_rank, config.pp_size],
            "context parallel": [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size],
        }
        options = ChunkOptions(self._disk_bytes, INDEX_BYTES, WRITE_BYTES_PER_DAY, self._disk_bytes)
        rank = f"rank-{config.pp_rank}-{config.tp_rank}-{config.attn_cp_rank}-{config.dp_rank}"
        self._tier = open_tier(self._directory / rank, options, rows["page bytes"], Identity(self._model, rows))

    # One page

    def exists(self, key: str) -> bool:
        with self._lock:
            return self._opened.has(key.encode())

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:  # noqa: ARG002
        page = self.mem_pool_host.get_dummy_flat_data_page() if target_location is None else target_location
        return page if self._read([key], [page])[0] else None

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        return self._write([key], [value], None)

    # Many pages

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:  # noqa: ARG002
        pages = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        return [page if is_right else None for page, is_right in zip(pages, self._read(keys, pages), strict=True)]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        return self._write(keys, values, None)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        pages = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        right = self._read(keys, pages)
        for page, at, is_right in zip(pages, self._places(host_indices), right, strict=True):
            if is_right:  # what could not be read leaves the pool as it was
                self.mem_pool_host.set_from_flat_data_page(at, page)
        return right

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        pages = [self.mem_pool_host.get_data_page(at, flat=True) for at in self._places(host_indices)]
        return [self._write(keys, pages, extra_info)] * len(keys)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        others = [each for each in pool_transfers or [] if each.name != PoolName.KV]
        hits = 0 if others else self.batch_exists(keys, extra_info)
        return PoolTransferResult(hits, {PoolName.KV: hits} if hits else {}, list(range(1, hits + 1)))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            each.name: (
                self.batch_get_v1(each.keys, each.host_indices, extra_info)
                if each.name == PoolName.KV
                else [False] * len(each.keys)
            )
            for each in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            each.name: (
                self.batch_set_v1(each.keys, each.host_indices, extra_info)
                if each.name == PoolName.KV
                else [False] * len(each.keys)
            )
            for each in transfers
        }

    def close(self) -> None:
        with self._lock:
            if self._tier is not None:
                self._tier.close()

    @property
    def _opened(self) -> Tier:
        assert self._tier is not None, "SGLang registers its pool in host memory first"
        return self._tier

    def _places(self, host_indices: torch.Tensor) -> list[int]:
        """The first index of each page."""
        return [int(at) for at in host_indices[:: int(self.mem_pool_host.page_size)]]

    def _read(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Fills pages. Those behind one that is not there, or not right, are not used: each needs all before it."""
        with self._lock:
            there = next((at for at, key in enumerate(keys) if not self._opened.has(key.encode())), len(keys))
            chunks = [Chunk(key.encode(), _bytes(page)) for key, page in zip(keys, pages, strict=True)][:there]
            number = next(self._numbers)
            if chunks:
                self._opened.load(number, chunks)
            ended = self._wait(number) if chunks else None
        is_right = isinstance(ended, Loaded) and ended.is_right
        return [is_right and at < there for at in range(len(keys))]

    def _write(
        self, keys: Sequence[str], pages: Sequence[torch.Tensor], extra_info: HiCacheStorageExtraInfo | None
    ) -> bool:
        before = [] if extra_info is None else extra_info.prefix_keys or []
        with self._lock:
            number = next(self._numbers)
            talk = f"call {number}"
            self._opened.follow(talk, [key.encode() for key in (*before, *keys)])
            chunks = [Chunk(key.encode(), _bytes(page)) for key, page in zip(keys, pages, strict=True)]
            self._opened.offer(number, talk, chunks)
            self._opened.ended(talk)
            ended = self._wait(number)
        return ended is not None and not ended.why_not

    def _wait(self, number: int) -> Any:
        """Waits for the end of a load or an offer, and lets other threads in meanwhile. None if it takes too long."""

        def has_ended() -> bool:
            for each in self._opened.poll():
                self._ended[each.load if isinstance(each, Loaded) else each.offer] = each
            return number in self._ended

        _until(self._lock, has_ended, WAIT_S)
        return self._ended.pop(number, None)


POLL_S = 0.001


def _until(lock: threading.Condition, is_so: Callable[[], bool], wait_s: float) -> None:
    """Returns when it is so, or after about `wait_s`."""
    for _ in range(int(wait_s / POLL_S)):
        if is_so():
            return
        lock.wait(POLL_S)


def _bytes(page: torch.Tensor) -> Bytes:
    """The page's own memory as bytes; a copy of it if it is not contiguous."""
    flat: Bytes = page.contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat


def _model_facts(config: HiCacheStorageConfig, cache_directory: Path) -> dict[str, Any]:
    import sglang.version

    model = Path(config.model_name or "")
    if not config.model_name or not model.exists():
        raise ConfigError(
            f"parkd-tier cannot find the files of {config.model_name!r}, so it cannot tell which weights state belongs "
            f"to: give SGLang the folder that has them"
        )
    try:
        cache = ModelCache(cache_directory)
    except ModelError as error:
        raise ConfigError(error.message) from error
    return {
        "sglang": sglang.version.__version__,
        "torch": torch.__version__,
        "weights": weights_digest(model, cache),
    }
