"""parkd-tier behind SGLang's HiCacheStorage: the interface's own classes over a pool that is only memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_tier.sglang import ParkdStorage
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from parkd.errors import ConfigError

PAGE_TOKENS = 4
PAGE_VALUES = 3000
KEYS = [f"{at:064x}" for at in range(6)]


class Pool:
    """Memory of a host, in pages of `PAGE_TOKENS` indices."""

    page_size = PAGE_TOKENS
    layout = "page_first"

    def __init__(self, pages: int = 12) -> None:
        self.memory = torch.randn(pages, PAGE_VALUES, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE_VALUES, dtype=torch.bfloat16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.memory[index // PAGE_TOKENS]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.memory[index // PAGE_TOKENS] = page


def indices(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"the weights, one")
    return tmp_path / "model"


def config_of(model: Path | str, **extra: Any) -> HiCacheStorageConfig:
    folder = Path(model).parent
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=str(model),
        extra_config={
            "backend_name": "parkd",
            "module_path": "parkd_tier.sglang",
            "class_name": "ParkdStorage",
            "directory": str(folder / "park"),
            "disk_mib": 16,
            "cache_directory": str(folder / "cache"),
        }
        | extra,
    )


@contextmanager
def opened(model: Path, pool: Pool) -> Iterator[ParkdStorage]:
    storage = StorageBackendFactory.create_backend("dynamic", config_of(model), pool)
    assert isinstance(storage, ParkdStorage)
    storage.register_mem_pool_host(pool)
    yield storage
    storage.close()


def test_sglang_makes_it_by_its_own_factory(model: Path) -> None:
    with opened(model, Pool()) as storage:
        assert isinstance(storage, HiCacheStorage)


def test_pages_come_back_also_after_a_restart(model: Path) -> None:
    pool = Pool()
    stored = pool.memory[:5].clone()
    with opened(model, pool) as storage:
        assert storage.batch_set_v1(KEYS[:5], indices(0, 5)) == [True] * 5
        assert storage.batch_exists(KEYS) == 5
    with opened(model, pool) as storage:
        assert storage.batch_get_v1(KEYS, indices(6, 6)) == [True] * 5 + [False]
        assert torch.equal(pool.memory[6:11], stored)
        page = storage.get(KEYS[2])
        assert page is not None
        assert torch.equal(page, stored[2])
        assert storage.batch_get([KEYS[5]]) == [None]


def test_a_call_continues_the_one_before(model: Path) -> None:
    pool = Pool()
    with opened(model, pool) as storage:
        storage.batch_set_v1(KEYS[:3], indices(0, 3))
        assert all(storage.batch_set_v1(KEYS[3:5], indices(3, 2), HiCacheStorageExtraInfo(prefix_keys=KEYS[:3])))
        assert storage.batch_exists(KEYS) == 5
    manifests = list((model.parent / "park").rglob("*.manifest"))
    assert len(manifests) == 1, "the conversation grew"


def test_a_tail_without_its_head_is_not_kept(model: Path) -> None:
    with opened(model, Pool()) as storage:
        extra = HiCacheStorageExtraInfo(prefix_keys=KEYS[:3])
        assert storage.batch_set_v1(KEYS[3:5], indices(3, 2), extra) == [False, False]
        assert not storage.exists(KEYS[3])


def test_a_flipped_byte_is_a_miss_and_leaves_the_pool_alone(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    with opened(model, pool) as storage:
        storage.batch_set_v1(KEYS[:3], indices(0, 3))
        [extent] = (model.parent / "park").rglob("*.extent")
        damaged = bytearray(extent.read_bytes())
        damaged[5000] ^= 4
        extent.write_bytes(damaged)
        before = pool.memory.clone()
        caplog.set_level(logging.WARNING)
        assert storage.batch_get_v1(KEYS[:3], indices(6, 3)) == [False] * 3
        assert torch.equal(pool.memory, before)
        assert storage.batch_exists(KEYS) == 0
        assert "is not what was written" in caplog.text


def test_state_of_other_weights_is_a_miss(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    with opened(model, pool) as storage:
        storage.batch_set_v1(KEYS[:3], indices(0, 3))
    (model / "model.safetensors").write_bytes(b"the weights, two")
    with opened(model, pool) as storage:
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS[:3], indices(6, 3)) == [False] * 3
    assert "cannot be used here" in caplog.text


def test_a_model_with_more_pools_finds_nothing(model: Path) -> None:
    pool = Pool()
    with opened(model, pool) as storage:
        written = storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=indices(0, 3), keys=KEYS[:3])])
        assert written == {PoolName.KV: [True] * 3}
        assert storage.batch_exists_v2(KEYS).kv_hit_pages == 3
        state = PoolTransfer(PoolName.MAMBA, host_indices=indices(0, 1), keys=KEYS[:1])
        assert storage.batch_exists_v2(KEYS, [state]).kv_hit_pages == 0
        assert storage.batch_set_v2([state]) == storage.batch_get_v2([state]) == {PoolName.MAMBA: [False]}


def test_two_threads_use_it_at_once(model: Path) -> None:
    pool = Pool(pages=40)
    wrong: list[int] = []
    with opened(model, pool) as storage:
        storage.batch_set_v1(KEYS[:3], indices(0, 3))

        def read() -> None:
            for at in range(20):
                page = storage.get(KEYS[at % 3])
                if page is None or not torch.equal(page, pool.memory[at % 3]):
                    wrong.append(at)

        reader = threading.Thread(target=read)
        reader.start()
        for at in range(4, 24):
            assert storage.batch_set_v1([f"other {at}"], indices(at, 1)) == [True]
        reader.join()
    assert wrong == []


@pytest.mark.parametrize("extra", [{"disk_mib": 0}, {"disk_mib": None}, {"directory": None}])
def test_wrong_settings_are_named(model: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="parkd-tier needs"):
        ParkdStorage(config_of(model, **extra))


def test_weights_that_cannot_be_found_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot tell which weights"):
        ParkdStorage(config_of(tmp_path / "nowhere"))
