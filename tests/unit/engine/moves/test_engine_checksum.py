"""Both checksums against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from parkd_engine.moves.checksum import Checksum, WeightedSum, Xxh3, checksum_for

KINDS = [Xxh3(), WeightedSum()]


def sample(nbytes: int = 4096) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8))


def of(kind: Checksum, *pieces: torch.Tensor) -> int:
    running = kind.start()
    for piece in pieces:
        running.update(piece)
    return int(kind.values([running])[0])


def test_xxh3_is_xxh3() -> None:
    assert of(Xxh3(), sample()) == xxhash.xxh3_64_intdigest(sample().numpy().tobytes())


def test_weighted_sum_is_its_formula() -> None:
    words = np.frombuffer(sample().numpy().tobytes(), dtype="<u8")
    expected = sum(int(word) * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    assert of(WeightedSum(), sample()) == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_pieces_do_not_matter(kind: Checksum) -> None:
    whole = sample()
    assert of(kind, whole[:8], whole[8:1024], whole[1024:]) == of(kind, whole)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_changed_bit_and_any_exchanged_words_show(kind: Checksum) -> None:
    good = of(kind, sample(256))
    for byte in range(256):
        for bit in (1, 128):
            damaged = sample(256)
            damaged[byte] ^= bit
            assert of(kind, damaged) != good
    exchanged = sample(256).view(torch.int64)
    exchanged[[3, 17]] = exchanged[[17, 3]]
    assert of(kind, exchanged.view(torch.uint8)) != good


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_keep_their_order(kind: Checksum) -> None:
    parts = [sample(64 * size) for size in (1, 3, 2)]
    running = [kind.start() for _ in parts]
    for each, part in zip(reversed(running), reversed(parts), strict=True):
        each.update(part)
    values = kind.values([*running, kind.start()])
    assert values.dtype == np.uint64
    assert [int(value) for value in values[:3]] == [of(kind, part) for part in parts]
    assert int(values[3]) == of(kind)


def test_one_device_other_than_cpu_makes_all_use_the_sum() -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda", 0)
    assert checksum_for([cpu, cpu]).name == "xxh3-64"
    assert checksum_for([cpu, card]).name == "weighted-sum-64"
