"""What is expected back: what of it is read ahead, and what became of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from parkd.identity.chain import prefix_hashes
from parkd.identity.units import units_of
from parkd.lane.metrics import Metrics
from parkd.lane.returns import EXPECTED_LIMIT, WITHIN_S, Returns
from parkd.store.records import Tier
from parkd.types import ConversationKey, PromptIdentity

pytestmark = pytest.mark.anyio
KEY = ConversationKey("", b"model", b"")


def prompt(first: int, tokens: int = 300) -> PromptIdentity:
    ids = np.arange(first, first + tokens, dtype=np.int64)
    return PromptIdentity(KEY, ids, units_of(ids), prefix_hashes(units_of(ids), KEY.digest, 256))


@dataclass
class Row:
    id: str
    tier: Tier
    position: int = 300


@dataclass
class Shelf:
    """A store and its disk."""

    rows: dict[str, Row] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    held: int = 0
    most_held: int = 0
    while_reading: Callable[[], None] = lambda: None
    refuses: bool = False

    def get(self, name: str) -> Row | None:
        return self.rows.get(name)

    def expect(self, _key: bytes, _hashes: tuple[bytes, ...]) -> Callable[[], None]:
        self.held += 1
        self.most_held = max(self.most_held, self.held)

        def release() -> None:
            self.held -= 1

        return release

    async def promote_ahead(self, name: str, stop: int) -> Row | None:
        assert stop == 300
        self.while_reading()
        self.read.append(name)
        if self.refuses:
            return None
        self.rows[name].tier = Tier.PROMOTED
        return self.rows[name]


class Kit:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.shelf = Shelf()
        self.metrics = Metrics(waiting=lambda: 0, store_stats=None)
        shelf: Any = self.shelf
        self.returns = Returns(shelf, shelf, self.metrics, lambda: self.now_s)

    def expect(self, *names: int, tier: Tier = Tier.DISK) -> None:
        for name in names:
            self.shelf.rows[str(name)] = Row(str(name), tier)
            self.returns.expect(prompt(name * 1000), str(name))

    @property
    def counts(self) -> tuple[int, int, int]:
        page = self.metrics.page().decode()
        names = ("", "_hits", "_waste")
        ahead, hits, waste = (int(float(page.split(f"\nparkd_read_ahead{n}_total ")[1].split()[0])) for n in names)
        return ahead, hits, waste


async def test_what_is_only_on_disk_is_read_once_the_newest_first_and_none_goes_for_another() -> None:
    kit = Kit()
    kit.expect(1, 2)
    kit.expect(3, tier=Tier.RAM)
    await kit.returns.read_ahead(lambda: True)
    assert kit.shelf.read == ["2", "1"]
    assert (kit.shelf.held, kit.shelf.most_held) == (0, 3)
    kit.shelf.rows["1"].tier = Tier.DISK
    await kit.returns.read_ahead(lambda: True)
    assert kit.shelf.read == ["2", "1"], "not again"
    assert kit.counts == (2, 0, 0)


async def test_nothing_more_is_read_once_somebody_runs() -> None:
    kit, idle = Kit(), [True]
    kit.expect(1, 2)
    kit.shelf.while_reading = idle.clear
    await kit.returns.read_ahead(lambda: bool(idle))
    assert kit.shelf.read == ["2"]
    await kit.returns.read_ahead(lambda: False)
    assert (kit.shelf.read, kit.shelf.held) == (["2"], 0)


async def test_what_comes_back_to_it_is_a_hit_and_all_else_is_waste() -> None:
    kit = Kit()
    kit.expect(1, 2, 3, 4)
    kit.shelf.rows["4"].tier = Tier.RAM
    await kit.returns.read_ahead(lambda: True)
    assert kit.counts == (3, 0, 0)
    kit.returns.came(prompt(1000, 500))
    assert kit.counts == (3, 1, 0)
    kit.shelf.rows["2"].tier = Tier.DISK
    kit.returns.came(prompt(2000, 500))
    assert kit.counts == (3, 1, 1), "it left memory before"
    kit.returns.came(prompt(4000, 500))
    kit.returns.came(prompt(9000, 500))
    assert (kit.counts, len(kit.returns)) == ((3, 1, 1), 1)
    kit.now_s = WITHIN_S + 1
    kit.returns.came(prompt(9000, 500))
    assert (kit.counts, len(kit.returns)) == ((3, 1, 2), 0), "it took too long"


async def test_what_was_refused_is_neither() -> None:
    kit = Kit()
    kit.shelf.refuses = True
    kit.expect(1)
    await kit.returns.read_ahead(lambda: True)
    kit.returns.came(prompt(1000, 500))
    assert kit.counts == (0, 0, 0)


async def test_so_many_are_expected_and_the_oldest_go() -> None:
    kit = Kit()
    kit.expect(0)
    await kit.returns.read_ahead(lambda: True)
    kit.expect(*range(1, EXPECTED_LIMIT + 1))
    kit.returns.expect(prompt(1, 200), "short")
    assert (len(kit.returns), kit.counts) == (EXPECTED_LIMIT, (1, 0, 1))


async def test_what_comes_back_while_another_is_read_is_not_read() -> None:
    kit = Kit()
    kit.expect(1, 2)
    kit.shelf.while_reading = lambda: kit.returns.came(prompt(1000, 500))
    await kit.returns.read_ahead(lambda: True)
    assert kit.shelf.read == ["2"]
