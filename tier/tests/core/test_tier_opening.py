"""A tier over a real directory: threads, restarts, and what is said of state that cannot be used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from parkd_tier.cli import main
from parkd_tier.identity import Identity
from parkd_tier.opening import open_tier
from parkd_tier.tier import Loaded, Tier

from parkd.errors import ConfigError
from parkd.store.chunks import Chunk, ChunkOptions

CHUNK_BYTES = 8192
MODEL = {"weights": "one", "vllm": "0.32.0"}
ROWS = {"tensor parallel size": 1}
OPTIONS = ChunkOptions(1 << 20, 1 << 20, 1 << 30, 1 << 20)
KEYS = [f"key {at}".encode() for at in range(5)]


def content(at: int) -> np.ndarray:
    return np.random.default_rng(at).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


@contextmanager
def opened(directory: Path, identity: Identity | None = None) -> Iterator[Tier]:
    tier = open_tier(directory, OPTIONS, CHUNK_BYTES, identity or Identity(MODEL, ROWS))
    try:
        yield tier
    finally:
        tier.close()


def outcome(tier: Tier) -> object:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        outcomes = tier.poll()
        if outcomes:
            assert len(outcomes) == 1
            return outcomes[0]
        time.sleep(0.001)
    raise AssertionError("nothing ended")


def store(tier: Tier) -> None:
    tier.offer(1, "talk", [Chunk(key, content(at)) for at, key in enumerate(KEYS)])
    tier.ended("talk")
    assert outcome(tier).bytes == len(KEYS) * CHUNK_BYTES  # type: ignore[attr-defined]


def load(tier: Tier) -> tuple[bool, np.ndarray]:
    buffer = np.full((len(KEYS), CHUNK_BYTES), 0xEE, dtype=np.uint8)
    tier.load(2, [Chunk(key, buffer[at]) for at, key in enumerate(KEYS)])
    loaded = outcome(tier)
    assert isinstance(loaded, Loaded)
    return loaded.is_right, buffer


def test_what_was_stored_is_loaded_also_after_a_restart(tmp_path: Path) -> None:
    expected = np.stack([content(at) for at in range(len(KEYS))])
    with opened(tmp_path / "park") as tier:
        store(tier)
        is_right, buffer = load(tier)
        assert is_right
        assert np.array_equal(buffer, expected)
    with opened(tmp_path / "park") as tier:
        is_right, buffer = load(tier)
        assert is_right
        assert np.array_equal(buffer, expected)


def test_a_load_of_what_is_gone_ends_as_wrong(tmp_path: Path) -> None:
    with opened(tmp_path / "park") as tier:
        assert not load(tier)[0]


def test_a_damaged_file_is_a_load_that_failed_and_then_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path / "park") as tier:
        store(tier)
        [extent] = (tmp_path / "park").glob("*.extent")
        damaged = bytearray(extent.read_bytes())
        damaged[CHUNK_BYTES + 5] ^= 1
        extent.write_bytes(damaged)
        assert not load(tier)[0]
        assert not any(map(tier.has, KEYS))


def test_drain_leaves_nothing_that_uses_memory(tmp_path: Path) -> None:
    with opened(tmp_path / "park") as tier:
        tier.offer(1, "talk", [Chunk(key, content(at)) for at, key in enumerate(KEYS)])
        tier.drain()
        assert not tier.is_busy
        assert [each.bytes for each in tier.poll()] == [len(KEYS) * CHUNK_BYTES], "it had not ended, and was written"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Identity({**MODEL, "weights": "two"}, ROWS), "weights one, here two"),
        (Identity({**MODEL, "vllm": "0.32.1"}, ROWS), "vllm 0.32.0, here 0.32.1"),
        (Identity(MODEL, {"tensor parallel size": 2}), "tensor parallel size 1, here 2"),
    ],
)
def test_state_of_another_engine_is_not_used_and_the_log_says_why(
    tmp_path: Path, other: Identity, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "park") as tier:
        store(tier)
    caplog.set_level(logging.WARNING)
    with opened(tmp_path / "park", other) as tier:
        assert not any(map(tier.has, KEYS))
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "1 conversation on disk (0.0 MiB) cannot be used here and will make room first: written with " + told
    )
    caplog.clear()
    with opened(tmp_path / "park") as tier:
        assert load(tier)[0], "it is still there for whoever wrote it"
    assert not caplog.records


def test_descriptions_of_those_who_left_nothing_are_removed(tmp_path: Path) -> None:
    for version in ("0.32.0", "0.32.1", "0.32.2"):
        with opened(tmp_path / "park", Identity({**MODEL, "vllm": version}, ROWS)):
            pass
    assert len(list((tmp_path / "park").glob("*.identity"))) == 1


def test_a_directory_has_one_process(tmp_path: Path) -> None:
    with opened(tmp_path / "park"), pytest.raises(ConfigError, match="in use"):
        open_tier(tmp_path / "park", OPTIONS, CHUNK_BYTES, Identity(MODEL, ROWS))


def test_look_says_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "park") as tier:
        store(tier)
    assert main(["look", "--dir", str(tmp_path / "park")]) == 0
    line = capsys.readouterr().out
    assert line.startswith("1 conversations, 0.0 MiB: ")
    assert '"weights": "one"' in line
    assert main(["look", "--dir", str(tmp_path / "elsewhere")]) == 2
