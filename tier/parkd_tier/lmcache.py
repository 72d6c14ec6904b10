"""Behind LMCache: an L2 adapter that its own plugin adapter loads.

    {"type": "plugin", "module_path": "parkd_tier.lmcache", "class_name": "ParkdL2Adapter", "adapter_params":
     {"directory": DIRECTORY, "disk_mib": N, "model": FOLDER, "model_name": NAME}}

An object of LMCache is a chunk. `model` is the folder of the weights and `model_name` what LMCache calls the model:
keys say only the name, so objects of another are neither kept nor found. LMCache does not say which objects come before
those of a store, so each store is a conversation of its own. Objects of each size, of which a model has one for each
kind of group, have a directory and a budget of their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from parkd.errors import ConfigError, ModelError
from parkd.model_files.cache import ModelCache
from parkd.store.budget import MIB
from parkd.store.chunks import Chunk, ChunkOptions, Key
from parkd_tier.identity import Identity
from parkd_tier.opening import open_tier
from parkd_tier.tier import Loaded, Tier
from parkd_tier.weights import weights_digest

KEY_BYTES = 32
INDEX_BYTES = 64 * MIB
WRITE_BYTES_PER_DAY = 200 << 30
MOST_SIZES = 8
"""Sizes of objects that are kept: one for each group of layers of a model."""
POLL_S = 0.001


class ParkdL2Adapter(L2AdapterInterface):
    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002
        """Raises ConfigError if a setting is missing or the weights cannot be found."""
        super().__init__()
        disk_mib, names = params.get("disk_mib"), ("directory", "model", "model_name")
        if (
            not isinstance(disk_mib, int)
            or disk_mib <= 0
            or not all(isinstance(params.get(each), str) for each in names)
        ):
            raise ConfigError("parkd-tier needs 'directory', 'disk_mib', 'model' and 'model_name' in adapter_params")
        self._directory = Path(params["directory"]).expanduser()
        self._disk_bytes = disk_mib * MIB
        self._model_name = str(params["model_name"])
        self._model = _model_facts(
            Path(params["model"]).expanduser(), Path(params.get("cache_directory") or "~/.cache/parkd").expanduser()
        )
        self._tiers: dict[int, Tier] = {}
        self._lock = threading.Condition()
        """LMCache calls from two threads; a tier is for one."""
        self._tasks = count()
        self._stores: dict[int, int] = {}
        """Bytes of stores under way, by task."""
        self._loads: dict[int, tuple[int, ...]] = {}
        """Places of the objects that are being loaded, and last their number, by task."""
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._fds = tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="parkd-tier-lmcache", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        return self._fds[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._fds[1]

    def get_load_event_fd(self) -> int:
        return self._fds[2]

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        with self._lock:
            task = next(self._tasks)
            size, tier = self._tier_of(keys, objects)
            if tier is None:
                self._stored[task] = L2StoreResult(False, 0)
                os.eventfd_write(self._fds[0], 1)
                return task
            self._stores[task] = size * len(keys)
            talk = f"task {task}"
            tier.offer(task, talk, [Chunk(_key(key), _bytes(each)) for key, each in zip(keys, objects, strict=True)])
            tier.ended(talk)
            self._lock.notify()
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Nothing is locked: a load of what went meanwhile fails, as it may."""
        with self._lock:
            task, found = next(self._tasks), Bitmap(len(keys))
            for at, key in enumerate(keys):
                layout = group_layout_descs.get(key.object_group_id)
                size = 0 if layout is None else _layout_bytes(layout)
                tier = self._opened(size) if size and key.model_name == self._model_name else None
                if tier is not None and tier.has(_key(key)):
                    found.set(at)
            self._found[task] = found
        os.eventfd_write(self._fds[1], 1)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        with self._lock:
            task = next(self._tasks)
            _, tier = self._tier_of(keys, objects)
            there = tuple(at for at, key in enumerate(keys) if tier is not None and tier.has(_key(key)))
            if tier is None or not there:
                self._loaded[task] = Bitmap(len(keys))
                os.eventfd_write(self._fds[2], 1)
                return task
            self._loads[task] = (*there, len(keys))
            tier.load(task, [Chunk(_key(keys[at]), _bytes(objects[at])) for at in there])
            self._lock.notify()
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        self._thread.join()
        for tier in self._tiers.values():
            tier.close()
        for fd in self._fds:
            os.close(fd)

    def _serve(self) -> None:
        """Notes what has ended, as long as something is under way."""
        with self._lock:
            while not self._is_closed:
                for tier in self._tiers.values():
                    for each in tier.poll():
                        self._note(each)
                is_busy = self._stores or self._loads or any(tier.is_busy for tier in self._tiers.values())
                self._lock.wait(POLL_S if is_busy else None)

    def _note(self, ended: Any) -> None:
        if isinstance(ended, Loaded):
            *there, number = self._loads.pop(ended.load)
            found = Bitmap(number)
            for at in there if ended.is_right else ():
                found.set(at)
            self._loaded[ended.load] = found
            os.eventfd_write(self._fds[2], 1)
        else:
            size = self._stores.pop(ended.offer)
            self._stored[ended.offer] = L2StoreResult(not ended.why_not, min(size, ended.bytes))
            os.eventfd_write(self._fds[0], 1)

    def _tier_of(self, keys: Sequence[Any], objects: Sequence[Any]) -> tuple[int, Tier | None]:
        """The size of these objects and their tier; None if they are of several sizes, or of another model."""
        sizes = {each.get_size() for each in objects}
        if len(sizes) != 1 or any(key.model_name != self._model_name for key in keys):
            return 0, None
        [size] = sizes
        return size, self._opened(size)

    def _opened(self, size: int) -> Tier | None:
        if size not in self._tiers:
            if len(self._tiers) == MOST_SIZES:
                return None
            options = ChunkOptions(self._disk_bytes, INDEX_BYTES, WRITE_BYTES_PER_DAY, self._disk_bytes)
            identity = Identity(self._model, {"object bytes": size})
            self._tiers[size] = open_tier(self._directory / f"objects-{size}", options, size, identity)
        return self._tiers[size]


def _key(key: Any) -> Key:
    """Of all fields of LMCache's key."""
    hasher = blake2b(digest_size=KEY_BYTES, person=b"parkd-lmcache")
    fields = (key.chunk_hash, str(key.kv_rank).encode(), str(key.object_group_id).encode(), key.cache_salt.encode())
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def _bytes(memory: Any) -> Any:
    """`[size]`: the object's own memory."""
    return np.frombuffer(memory.byte_array, dtype=np.uint8)


def _layout_bytes(layout: Any) -> int:
    return sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )


def _model_facts(model: Path, cache_directory: Path) -> dict[str, Any]:
    from importlib.metadata import version

    if not model.exists():
        raise ConfigError(f"parkd-tier cannot find the weights in {model}: 'model' is the folder that has them")
    try:
        cache = ModelCache(cache_directory)
    except ModelError as error:
        raise ConfigError(error.message) from error
    return {"lmcache": version("lmcache"), "torch": torch.__version__, "weights": weights_digest(model, cache)}
