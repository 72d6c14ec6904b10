"""parkd-tier behind LMCache's L2AdapterInterface, made by LMCache's own plugin factory."""

from __future__ import annotations

import logging
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache.v1.distributed.l2_adapters.base")
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from parkd_tier.lmcache import ParkdL2Adapter

from parkd.errors import ConfigError

SHAPE = torch.Size([2, 1500])
LAYOUTS = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}
WAIT_MS = 30_000


def key(at: int, **fields: Any) -> ObjectKey:
    return ObjectKey(**{"chunk_hash": at.to_bytes(32, "big"), "model_name": "a-model", "kv_rank": 1} | fields)


KEYS = [key(at) for at in range(4)]


def memory(seed: int | None) -> TensorMemoryObj:
    """An object with content of its seed, or without."""
    size = SHAPE.numel() * 2
    raw = torch.zeros(size, dtype=torch.uint8)
    if seed is not None:
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    known = MemoryObjMetadata(SHAPE, torch.bfloat16, 0, size, 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(raw, known, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"the weights, one")
    return tmp_path / "model"


@contextmanager
def opened(model: Path) -> Iterator[L2AdapterInterface]:
    folder = model.parent
    params = {"directory": str(folder / "park"), "disk_mib": 16, "model": str(model), "model_name": "a-model"}
    params["cache_directory"] = str(folder / "cache")
    adapter = _create_plugin_adapter(PluginL2AdapterConfig("parkd_tier.lmcache", "ParkdL2Adapter", params))
    yield adapter
    adapter.close()


def wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(WAIT_MS), "nothing was signalled"


def store(adapter: L2AdapterInterface, keys: list[ObjectKey], seeds: list[int]) -> bool:
    task = adapter.submit_store_task(keys, [memory(seed) for seed in seeds])
    wait(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task].is_successful()


def look_up(adapter: L2AdapterInterface, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, LAYOUTS)
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert found is not None
    assert adapter.query_lookup_and_lock_result(task) is None
    return [found.test(at) for at in range(len(keys))]


def load(adapter: L2AdapterInterface, keys: list[ObjectKey]) -> tuple[list[bool], list[torch.Tensor]]:
    objects = [memory(None) for _ in keys]
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    found = adapter.query_load_result(task)
    assert found is not None
    return [found.test(at) for at in range(len(keys))], [each.raw_data for each in objects]


def test_objects_come_back_also_after_a_restart(model: Path) -> None:
    with opened(model) as adapter:
        assert isinstance(adapter, L2AdapterInterface)
        assert look_up(adapter, KEYS) == [False] * 4
        assert store(adapter, KEYS[:3], [1, 2, 3])
    with opened(model) as adapter:
        assert look_up(adapter, KEYS) == [True, True, True, False]
        found, content = load(adapter, KEYS)
        assert found == [True, True, True, False]
        for at in range(3):
            assert torch.equal(content[at], memory(at + 1).raw_data)
        adapter.submit_unlock(KEYS)


def test_a_flipped_byte_is_a_miss(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(model) as adapter:
        assert store(adapter, KEYS[:3], [1, 2, 3])
        [extent] = (model.parent / "park").rglob("*.extent")
        damaged = bytearray(extent.read_bytes())
        damaged[3000] ^= 16
        extent.write_bytes(damaged)
        caplog.set_level(logging.WARNING)
        assert load(adapter, KEYS[:3])[0] == [False] * 3
        assert look_up(adapter, KEYS) == [False] * 4
        assert "is not what was written" in caplog.text


def test_state_of_other_weights_is_a_miss(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(model) as adapter:
        assert store(adapter, KEYS[:3], [1, 2, 3])
    (model / "model.safetensors").write_bytes(b"the weights, two")
    with opened(model) as adapter:
        assert look_up(adapter, KEYS) == [False] * 4
        assert load(adapter, KEYS)[0] == [False] * 4
    assert "cannot be used here" in caplog.text


@pytest.mark.parametrize(
    "other", [{"cache_salt": "theirs"}, {"kv_rank": 2}, {"model_name": "another"}, {"object_group_id": 1}]
)
def test_every_field_of_a_key_counts(model: Path, other: dict[str, Any]) -> None:
    with opened(model) as adapter:
        assert store(adapter, KEYS[:1], [1])
        assert look_up(adapter, [key(0, **other)]) == [False]


def test_objects_of_another_model_are_not_kept(model: Path) -> None:
    with opened(model) as adapter:
        assert not store(adapter, [key(0, model_name="another")], [1])


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parkd-tier needs"):
        ParkdL2Adapter({"directory": str(tmp_path), "disk_mib": 5})
    with pytest.raises(ConfigError, match="cannot find the weights"):
        ParkdL2Adapter({"directory": str(tmp_path), "disk_mib": 5, "model": str(tmp_path / "no"), "model_name": "m"})
