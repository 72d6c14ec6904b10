"""What llama.cpp in process knows of cards: how long blocks are, and how memory is page-locked."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.engine_adapter.llama_cpp import cards
from parkd.engine_adapter.llama_cpp.cards import (
    block_tokens_for,
    copies_at_once,
    has_nvidia_card,
    page_locks,
    runtime_path,
)

MAPS = """\
7f00a0000000-7f00a0001000 r--p 00000000 fe:00 12  /usr/lib/libc.so.6
7f00b0000000-7f00b0001000 r--p 00000000 fe:00 13  /opt/with libcudart.so inside/libother.so
7f00c0000000-7f00c0001000 r--p 00000000 fe:00 14  /usr/local/cuda 13/lib64/libcudart.so.13.0.48
7f00d0000000-7f00d0001000 rw-p 00000000 00:00 0
"""


def test_the_runtime_is_found_among_mapped_files() -> None:
    assert runtime_path(MAPS.splitlines(keepends=True)) == "/usr/local/cuda 13/lib64/libcudart.so.13.0.48"
    assert runtime_path(MAPS.splitlines(keepends=True)[:2]) is None


@pytest.mark.parametrize(
    ("key_bytes", "uses_cards", "tokens"),
    [
        (2048, False, 256),
        (2048, True, 1024),
        (1088, True, 2048),
        (64, True, 2048),
        (8192, True, 256),
        (1 << 20, True, 256),
    ],
)
def test_blocks_on_cards_are_long_enough_for_a_link(key_bytes: int, uses_cards: bool, tokens: int) -> None:
    assert block_tokens_for(key_bytes, uses_cards) == tokens


@pytest.mark.parametrize(
    ("uses_cards", "has_fixed_state", "is_one"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_several_blocks_are_copied_at_once_where_that_costs_no_memory(
    uses_cards: bool, has_fixed_state: bool, is_one: bool
) -> None:
    assert (copies_at_once(uses_cards, has_fixed_state) == 1) == is_one


def test_memory_is_locked_for_all_cards_and_unlocked() -> None:
    class Runtime:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def cudaHostRegister(self, address, size, flags) -> int:  # noqa: N802 - CUDA's name
            self.calls.append(("lock", address.value, size.value, flags.value))
            return 0

        def cudaHostUnregister(self, address) -> int:  # noqa: N802
            self.calls.append(("unlock", address.value))
            return 0

    runtime, memory = Runtime(), np.zeros(1 << 16, dtype=np.uint8)
    hooks = page_locks(runtime)
    hooks.added(memory)
    assert hooks.settle(10)
    hooks.removed(memory)
    assert runtime.calls == [("lock", memory.ctypes.data, 1 << 16, 1), ("unlock", memory.ctypes.data)]


@pytest.mark.parametrize(("failed", "count", "is_there"), [(0, 2, True), (0, 0, False), (100, 1, False)])
def test_a_card_is_what_its_driver_sees(
    monkeypatch: pytest.MonkeyPatch, failed: int, count: int, is_there: bool
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's name
            assert flags == 0
            return failed

        def cuDeviceGetCount(self, found) -> int:  # noqa: N802
            found._obj.value = count
            return 0

    def load(name: str) -> Driver:
        if name != "libcuda.so.1":
            raise OSError
        return Driver()

    assert not has_nvidia_card(("no such library.so",))
    monkeypatch.setattr(cards.ctypes, "CDLL", load)
    assert has_nvidia_card() == is_there
