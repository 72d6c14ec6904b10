"""What a server holds of prompts by its KV events: read, remembered, and listened to on sockets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parkd.engine_adapter.remote.held import HeldBlocks, HeldPrefix
from parkd.engine_adapter.remote.kv_events import Cleared, Removed, Stored, events_of
from parkd.engine_adapter.remote.listening import KvListener
from parkd.errors import ConfigError
from tests.fakes.kv_publisher import BLOCK, CLEARED, FakePublisher, removed, stored

IDS = list(range(100, 116))
"""Four blocks."""


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def took(held: HeldBlocks, *events: dict[str, Any]) -> HeldBlocks:
    for event in events_of([1.0, list(events), 0]):
        held.take(event)
    return held


def test_events_are_read_as_maps_and_as_arrays() -> None:
    written = stored(IDS[:8], [1, b"two"], 7)
    as_array = ["BlockStored", [1, b"two"], 7, IDS[:8], BLOCK, None, "GPU", None, [None, None], 0]
    whole = Stored((1, b"two"), 7, tuple(IDS[:8]), BLOCK, ((), ()), "GPU", 0)
    older = ["BlockStored", [1], None, IDS[:4], BLOCK, None]
    assert list(events_of([1.0, [written, removed(1), CLEARED]])) == [whole, Removed((1,)), Cleared()]
    assert list(events_of({"ts": 1.0, "events": [as_array, ["BlockRemoved", [1], "CPU"], ["AllBlocksCleared"]]})) == [
        whole,
        Removed((1,), "CPU"),
        Cleared(),
    ]
    assert list(events_of([1.0, [older]])) == [Stored((1,), None, tuple(IDS[:4]), BLOCK, ((),), "GPU", 0)]


@pytest.mark.parametrize(
    "event",
    [
        None,
        7,
        [],
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockStored"},
        stored(IDS[:4], [1, 2]),
        stored([-1, 2, 3, 4], [1]),
        stored(IDS[:4], [1], block_size=0),
        stored(IDS[:4], [1], medium=3),
        stored(IDS[:4], [1], extra_keys=[None, None]),
        stored(IDS[:4], [[1]]),  # type: ignore[list-item]
        stored(IDS[:4], [1], parent=[3]),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_read_is_passed_over(event: Any) -> None:
    assert list(events_of([1.0, [event, CLEARED]])) == [Cleared()]
    assert list(events_of(event)) == []


def test_a_prompt_is_held_as_far_as_its_blocks_are() -> None:
    held = took(HeldBlocks(lambda: 0.0), stored(IDS[:8], [1, 2]), stored(IDS[8:], [3, 4], parent=2))
    assert held.of(ids(*IDS)) == HeldPrefix(16, 16)
    assert held.of(ids(*IDS, 7, 7)) == HeldPrefix(16, 16)
    assert held.of(ids(*IDS[:7])) == HeldPrefix(4, 4)
    assert held.of(ids(*IDS[:4], 9, 9, 9, 9, *IDS[8:])) == HeldPrefix(4, 4)
    assert held.of(ids(*IDS[4:])) == HeldPrefix(0, 0)
    assert held.of(ids(*IDS), "salt") == HeldPrefix(0, 0)
    stats = held.stats()
    assert (stats.blocks, stats.gone_blocks, stats.stored, stats.removed) == (4, 0, 4, 0)


def test_salts_hold_apart() -> None:
    held = took(HeldBlocks(lambda: 0.0), stored(IDS, [1, 2, 3, 4], salt="a"), stored(IDS[:4], [5], salt="b"))
    assert held.of(ids(*IDS), "a") == HeldPrefix(16, 16)
    assert held.of(ids(*IDS), "b") == HeldPrefix(4, 4)
    assert held.of(ids(*IDS)) == HeldPrefix(0, 0)


def test_what_was_given_up_is_told_with_where_and_since_when() -> None:
    now = [100.0]
    held = took(HeldBlocks(lambda: now[0]), stored(IDS, [1, 2, 3, 4]), removed(4), removed(9))
    now[0] = 107.5
    took(held, removed(3))
    now[0] = 110.0
    assert held.of(ids(*IDS)) == HeldPrefix(8, 16, "GPU", 2.5)
    took(held, stored(IDS[8:12], [3], parent=2))
    assert held.of(ids(*IDS)) == HeldPrefix(12, 16, "GPU", 10.0)
    took(held, CLEARED)
    assert held.of(ids(*IDS)) == HeldPrefix(0, 16, "GPU", 0.0)


def test_a_tier_below_holds_whole_chunks_that_it_names_by_their_last_block() -> None:
    """What leaves the device is still held there."""
    held = took(HeldBlocks(lambda: 0.0), stored(IDS, [1, 2, 3, 4]))
    took(held, stored([], [2], medium="CPU", block_size=2 * BLOCK), removed(1, 2, 3, 4))
    assert held.of(ids(*IDS)) == HeldPrefix(8, 16, "GPU", 0.0)
    took(held, removed(1, medium="CPU"))
    assert held.of(ids(*IDS)) == HeldPrefix(0, 16, "CPU", 0.0)


def test_of_models_with_several_groups_of_layers_nothing_is_told() -> None:
    held = took(HeldBlocks(lambda: 0.0), stored(IDS, [1, 2, 3, 4]), stored(IDS, [1, 2, 3, 4], group_idx=1))
    assert held.of(ids(*IDS)) is None
    assert held.stats().blocks == 0


def test_nothing_is_told_before_a_block_was_seen_nor_once_events_were_lost() -> None:
    held = HeldBlocks(lambda: 0.0)
    assert held.of(ids(*IDS)) is None
    took(held, stored(IDS[8:], [3, 4], parent=2))  # it follows what nobody has seen
    assert held.of(ids(*IDS)) == HeldPrefix(0, 0)
    took(held, stored(IDS, [1, 2, 3, 4]))
    held.forget()
    assert held.of(ids(*IDS)) is None
    assert held.stats().lost_track == 1


def test_what_is_remembered_is_bounded_and_what_is_gone_longest_leaves_first() -> None:
    held = HeldBlocks(lambda: 0.0, most_blocks=4)
    took(held, stored(IDS, [1, 2, 3, 4]), removed(4))
    took(held, stored([1, 2, 3, 4], [5]))
    assert held.of(ids(*IDS)) == HeldPrefix(12, 12)
    assert held.of(ids(1, 2, 3, 4)) == HeldPrefix(4, 4)
    took(held, stored([5, 6, 7, 8], [6]), stored([9, 9, 9, 9], [7]))
    assert held.stats().blocks + held.stats().gone_blocks == 4
    assert held.of(ids(9, 9, 9, 9)) == HeldPrefix(4, 4)


def test_random_lives_of_blocks_agree_with_a_model_of_sets() -> None:
    """The model keeps whole prefixes: what is held, and what was."""
    for seed in range(30):
        draw = random.Random(seed)
        held, now, ever = HeldBlocks(lambda: 0.0), set[tuple[int, ...]](), set[tuple[int, ...]]()
        for _ in range(60):
            prompt = tuple(draw.randrange(2) for _ in range(BLOCK * draw.randrange(1, 5)))
            prefixes = [prompt[: end + BLOCK] for end in range(0, len(prompt), BLOCK)]
            if draw.random() < 0.6:
                took(held, stored(prompt, [hash(each) for each in prefixes]))
                now |= set(prefixes)
                ever |= set(prefixes)
            elif now:
                gone = draw.choice(sorted(now))
                took(held, removed(hash(gone)))
                now.discard(gone)
            if ever:
                counts = [_whole(prefixes, known) for known in (now, ever)]
                found = held.of(ids(*prompt))
                assert found is not None
                assert [found.held_tokens, found.known_tokens] == [BLOCK * count for count in counts]


def _whole(prefixes: list[tuple[int, ...]], known: set[tuple[int, ...]]) -> int:
    return next((index for index, each in enumerate(prefixes) if each not in known), len(prefixes))


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def holds(held: HeldBlocks, tokens: int) -> Callable[[], bool]:
    def look() -> bool:
        found = held.of(ids(*IDS))
        return found is not None and found.held_tokens == tokens

    return look


def joined(publisher: FakePublisher, held: HeldBlocks) -> None:
    """Publishes until something arrives: a subscription takes a moment."""

    def some() -> bool:
        publisher.publish(stored([1, 1, 1, 1], [99]))
        return held.stats().stored > 0

    until(some)


def test_events_arrive_over_sockets_and_lost_ones_without_repetition_are_noticed() -> None:
    held = HeldBlocks(time.monotonic)
    with FakePublisher() as publisher:
        listener = KvListener(held, publisher.endpoint)
        listener.start()
        joined(publisher, held)
        publisher.publish(stored(IDS, [1, 2, 3, 4]))
        until(holds(held, 16))
        publisher.publish(removed(4))
        until(holds(held, 12))
        publisher.publish(removed(1), loses=True)
        publisher.publish(stored([1, 2, 3, 4], [8]))
        until(lambda: held.stats().lost_track == 1)
        until(lambda: held.of(ids(*IDS)) == HeldPrefix(0, 0))
        listener.close()
        listener.close()


@pytest.mark.parametrize("topics", [(b"",), ()], ids=["vLLM 0.32", "older"])
def test_what_was_before_and_what_was_lost_is_repeated(topics: tuple[bytes, ...]) -> None:
    held = HeldBlocks(time.monotonic)
    with FakePublisher(keeps=100, topics=topics) as publisher:
        publisher.publish(stored(IDS, [1, 2, 3, 4]))
        listener = KvListener(held, publisher.endpoint, publisher.replay_endpoint)
        listener.start()
        until(holds(held, 16))
        joined(publisher, held)
        publisher.publish(removed(2), loses=True)
        publisher.publish(stored([1, 2, 3, 4], [8]))
        until(holds(held, 4))
        assert held.stats().lost_track == 0
        listener.close()


def test_a_server_that_starts_anew_is_known_from_its_start() -> None:
    held = HeldBlocks(time.monotonic)
    with FakePublisher() as publisher:
        listener = KvListener(held, publisher.endpoint)
        listener.start()
        joined(publisher, held)
        publisher.publish(stored(IDS, [1, 2, 3, 4]))
        until(holds(held, 16))
        publisher._numbers = iter(range(100))  # type: ignore[assignment]
        publisher.publish(stored(IDS[:4], [1]))
        until(holds(held, 4))
        assert held.stats().lost_track == 1
        publisher.send(1, b"\xc1")  # no MessagePack
        until(lambda: held.stats().lost_track == 2)
        listener.close()


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        KvListener(HeldBlocks(time.monotonic), "nowhere")
