"""Host memory is page-locked in the background, and released before it goes."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from parkd.engine_adapter.pinned import PinnedMemory


class Driver:
    """Stands for CUDA: counts what is locked, and can be told to wait or to refuse."""

    def __init__(self, refuse_after: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._refuse_after = refuse_after

    def register(self, address: int, size: int) -> int:
        self.entered.set()
        assert self.gate.wait(10)
        if len(self.locked) >= self._refuse_after:
            return 2
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def hooks(self) -> PinnedMemory:
        return PinnedMemory(register=self.register, unregister=self.unregister, prepare=lambda _address, _size: None)


def memory() -> np.ndarray:
    return np.zeros(8192, dtype=np.uint8)


def test_what_is_added_gets_locked_and_what_is_removed_released() -> None:
    driver = Driver()
    hooks = driver.hooks()
    first, second = memory(), memory()
    hooks.added(first)
    hooks.added(second)
    assert hooks.settle(10)
    assert driver.locked == {first.ctypes.data: 8192, second.ctypes.data: 8192}
    assert hooks.locked_bytes == 16384
    hooks.removed(first)
    assert driver.locked == {second.ctypes.data: 8192}
    third = memory()
    hooks.added(third)
    assert hooks.settle(10)
    assert set(driver.locked) == {second.ctypes.data, third.ctypes.data}


def test_adding_waits_for_nothing_and_what_waits_can_be_taken_back() -> None:
    driver = Driver()
    driver.gate.clear()
    hooks = driver.hooks()
    first, second = memory(), memory()
    hooks.added(first)
    assert driver.entered.wait(10)
    hooks.added(second)
    assert not hooks.settle(0.01)
    hooks.removed(second)
    driver.gate.set()
    assert hooks.settle(10)
    assert driver.locked == {first.ctypes.data: 8192}


def test_locking_tells_how_far_it_is_of_all_that_was_added() -> None:
    driver, told = Driver(), list[float]()
    driver.gate.clear()
    hooks = PinnedMemory(
        register=driver.register,
        unregister=driver.unregister,
        prepare=lambda _address, _size: None,
        progress=lambda what, share: told.append(share) if "Page-locking" in what else None,
    )
    kept = [memory() for _ in range(4)]
    for each in kept:
        hooks.added(each)
    driver.gate.set()
    assert hooks.settle(10)
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_memory_is_not_taken_away_while_it_is_being_locked() -> None:
    driver = Driver()
    driver.gate.clear()
    hooks = driver.hooks()
    first = memory()
    hooks.added(first)
    assert driver.entered.wait(10)
    remover = threading.Thread(target=hooks.removed, args=(first,))
    remover.start()
    remover.join(0.05)
    assert remover.is_alive()
    driver.gate.set()
    remover.join(10)
    assert not remover.is_alive()
    assert driver.locked == {}


def test_a_refusal_warns_once_and_leaves_memory_pageable(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(refuse_after=1)
    hooks = driver.hooks()
    kept = [memory() for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        for each in kept:
            hooks.added(each)
        assert hooks.settle(10)
    assert len(driver.locked) == 1
    assert [record.message for record in caplog.records if "cannot be page-locked" in record.message] != []
    assert len(caplog.records) == 1
    for each in kept:
        hooks.removed(each)
    assert driver.locked == {}
