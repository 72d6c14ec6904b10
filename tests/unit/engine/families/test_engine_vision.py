"""Pictures in the timeline: read once, never cut where they see themselves, and their offset of positions is state."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import EngineConfig, Session, capture, host_transfer, open_session, restore
from parkd_engine.vision.tower import PromptImage

from parkd.errors import EngineFailure, StageFailed
from tests.unit.engine.kit.core_models import assert_same, read_and_decode, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model
from tests.unit.engine.kit.vision_models import IMAGE_ID, PICTURES, picture_logits, png, processor_of, put_pictures

BOTH = pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5-vl", "qwen4-exp-vl", "gemma3-vl"])
Ids = npt.NDArray[np.int64]


def opened(family: str, **settings: Any) -> tuple[Any, Session, Ids, tuple[PromptImage, ...]]:
    model = hybrid_model(family)
    session = tiny_session(2, model, **settings)
    ids, images = put_pictures(model, token_ids(130))
    assert len(images) == 2
    assert session.vision is not None
    return model, session, ids, images


def encoded(session: Session) -> int:
    assert session.vision is not None
    return session.vision.encoded


@BOTH
def test_each_picture_is_read_once_and_only_when_it_is_needed(family: str) -> None:
    """However many chunks it lies in; not at all when it lies before the position."""
    _, session, ids, (first, second) = opened(family, batch_tokens=7)
    seen: list[tuple[int, int]] = []
    session.extend(ids[:129], images=(first, second), on_chunk=lambda place: seen.append((place, encoded(session))))
    assert all(count == (place > first.start) + (place > second.start) for place, count in seen)
    session.reset()
    session.extend(ids[: first.stop + 1], checkpoint_at=(first.stop + 1,), images=(first, second))
    assert encoded(session) == 3
    session.extend(ids[first.stop + 1 : 129], images=(first, second))
    assert encoded(session) == 4


@BOTH
def test_another_picture_of_the_same_length_gives_other_logits(family: str) -> None:
    """Everything else equal, so a test that passes with any picture would prove nothing. Replays LMCache#4086."""
    model, session, ids, images = opened(family)
    sizes = PICTURES[model.config.model_type]
    others = tuple(replace(image, data=png(70, *size[1:])) for image, size in zip(images, sizes, strict=True))
    mine = read_and_decode(session, ids, images=images)
    session.reset()
    other = read_and_decode(session, ids, images=others)
    assert (mine[0] - other[0]).abs().max() > 1e-3
    plain = tiny_session(2, model)
    assert (mine[0] - read_and_decode(plain, ids)[0]).abs().max() > 1e-3


def test_the_offset_of_positions_is_restored_with_the_rest() -> None:
    """The library keeps it on the model: whoever read another picture meanwhile would be at that one's."""
    model, session, ids, images = opened("qwen3.5-vl", batch_tokens=64)
    session.extend(ids[:110], images=images)
    expected = [session.step(int(token)) for token in ids[110:113]]
    session.reset()
    session.extend(ids[:110], images=images)
    assert session.arenas[0].layout.fixed_bytes > session.arenas[0].layout.fixed_fields[-1].offset
    plan = host_transfer(session, 110, block_tokens=32)
    sums = capture(session, plan)
    plan = replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed)
    for _ in range(2):
        session.reset()
        plain = token_ids(50, seed=3)
        [text] = read_and_decode(session, plain)
        assert_same([text], read_and_decode(tiny_session(2, model), plain))
        restore(session, plan)
        assert_same([session.step(int(token)) for token in ids[110:113]], expected)
    other = tiny_session(2, model, batch_tokens=64)
    restore(other, plan)
    assert_same([other.step(int(token)) for token in ids[110:113]], expected)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3-vl-moe"])
def test_a_cut_finds_the_offset_that_holds_there(family: str) -> None:
    """Before, inside and behind pictures, wherever the session itself has read. What was restored tells the offset at
    its end only, so it is cut no further."""
    model, session, ids, images = opened(family, batch_tokens=64)
    first, second = images
    assert first.stop < 64 < 70 < second.start < second.stop < 110
    [expected] = picture_logits(model, ids, images, 512, 1)

    def check_from(place: int) -> None:
        session.truncate(place)
        session.extend(ids[place:129], images=images)
        torch.testing.assert_close(session.step(int(ids[129])), expected, atol=1e-4, rtol=0)

    def restore_at(place: int, kept: int = 0) -> None:
        """Parks `[kept, place)`, reads something else there and restores it."""
        session.truncate(place)
        plan = host_transfer(session, place, start=kept, block_tokens=32)
        sums = capture(session, plan)
        session.truncate(kept)
        session.extend(token_ids(place - kept, seed=3))
        session.truncate(kept)
        restore(session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed))

    session.extend(ids[:129], images=images)
    for place in (110, second.stop, second.start + 7, 64, first.stop + 3, first.stop, first.start + 5, first.start):
        assert session.rewind_floor == 0
        check_from(place)
    restore_at(110, kept=64)
    assert session.rewind_floor == 110
    check_from(110)
    with pytest.raises(ValueError, match="cannot truncate to 109"):
        session.truncate(109)
    session.reset()
    session.extend(ids[:129], images=images)
    restore_at(70, kept=64)  # No picture is between: what was known before still is.
    assert session.rewind_floor == 0
    check_from(first.stop)
    restore_at(first.start)
    assert session.rewind_floor == 0
    check_from(first.start - 3)


def test_reading_goes_on_inside_a_picture_that_does_not_see_itself() -> None:
    """Cancelled after a chunk that ended there; positions inside are told from the picture's start."""
    model, session, ids, images = opened("qwen3.5-vl", batch_tokens=64)
    inside = (images[0].start + 5, images[1].start + 7)
    session.extend(ids[:129], images=images, checkpoint_at=inside)
    expected = [session.step(int(ids[129]))]
    for place in reversed(inside):
        session.truncate(place)
        session.extend(ids[place:129], images=images, checkpoint_at=inside)
        assert_same([session.step(int(ids[129]))], expected)
    cancel = threading.Event()
    session.reset()
    session.extend(ids[:129], images=images, checkpoint_at=inside, cancel=cancel, on_chunk=lambda _: cancel.set())
    assert session.position == inside[0]
    session.extend(ids[inside[0] : 129], images=images, checkpoint_at=inside)
    assert_same([session.step(int(ids[129]))], expected)
    [whole] = picture_logits(model, ids, images, 512, 1)
    torch.testing.assert_close(expected[0], whole, atol=1e-4, rtol=0)


def test_no_chunk_ends_inside_a_picture_that_sees_itself() -> None:
    """Nor is a checkpoint taken there, whatever the batch size is, and the state is cut at its edges only."""
    _, session, ids, (first, second) = opened("gemma3-vl", batch_tokens=8)
    chunks: list[int] = []
    session.extend(ids[:129], images=(first, second), checkpoint_at=range(1, 129), on_chunk=chunks.append)
    for image in (first, second):
        assert image.start in chunks
        assert image.stop in chunks
        assert not any(image.start < place < image.stop for place in (*chunks, *session.checkpoints))
    session.reset()
    session.extend(ids[: first.stop + 5], images=(first, second))
    for place in range(first.start + 1, first.stop):
        with pytest.raises(ValueError, match="inside an image"):
            session.truncate(place)
    session.truncate(first.stop)
    session.truncate(first.start)
    session.extend(token_ids(first.stop + 5)[session.position :])
    session.truncate(first.start + 1)


def test_a_picture_that_sees_itself_is_read_whole_or_not() -> None:
    _, session, ids, (first, second) = opened("gemma3-vl")
    with pytest.raises(ValueError, match="cannot be read in parts"):
        session.extend(ids[: first.start + 3], images=(first,))
    session.extend(ids[: first.start + 3])
    with pytest.raises(ValueError, match="cannot be read in parts"):
        session.extend(ids[first.start + 3 : 129], images=(first, second))
    with pytest.raises(ValueError, match="overlaps another"):
        session.extend(ids[first.start + 3 : 129], images=(second, second))
    assert session.position == first.start + 3


@pytest.mark.parametrize("window", [2, 9, 16, 17, 40])
def test_windows_shorter_and_longer_than_a_picture(window: int) -> None:
    """A token of a picture sees ahead to its end and back through the window, as under the library's masks."""
    model = hybrid_model("gemma3-vl", sliding_window=window)
    ids, images = put_pictures(model, token_ids(130))
    expected = picture_logits(model, ids, images, 512, 3)
    for batch_tokens in (5, 16, 64):
        session = tiny_session(2, model, batch_tokens=batch_tokens)
        for mine, other in zip(read_and_decode(session, ids, 3, images), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [3, 24])
def test_more_queries_than_a_block_beside_a_picture(window: int) -> None:
    """Attention goes in blocks of 256 queries: a picture lies in one, over two, where a window may begin inside it, and
    behind one."""
    model = hybrid_model("gemma3-vl", sliding_window=window)
    for start in (100, 248, 300):
        ids = np.where(token_ids(340) == IMAGE_ID, 0, token_ids(340))
        ids[start : start + 16] = IMAGE_ID
        images = (PromptImage(start, start + 16, png(1, 30, 30)),)
        session = tiny_session(1, model, batch_tokens=512)
        [mine] = read_and_decode(session, ids, images=images)
        [other] = picture_logits(model, ids, images, 512, 1)
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@BOTH
def test_a_picture_that_cannot_be_read_leaves_the_state_before_its_chunk(family: str) -> None:
    _, session, ids, (first, second) = opened(family, batch_tokens=16)
    with pytest.raises(EngineFailure, match="it is none of"):
        session.extend(ids[:129], images=(first, replace(second, data=b"no picture")))
    assert first.stop < session.position <= second.start
    with pytest.raises(EngineFailure, match="positions, and the prompt leaves"):
        session.extend(ids[session.position : 129], images=(replace(second, stop=second.stop + 1),))
    session.extend(ids[session.position : 129], images=(first, second))
    expected = session.step(int(ids[129]))
    session.reset()
    [again] = read_and_decode(session, ids, images=(first, second))
    torch.testing.assert_close(expected, again, atol=1e-4, rtol=0)


def test_a_tower_that_fails_fails_the_stage_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, session, ids, images = opened("qwen3.5-vl")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    assert session.vision is not None
    monkeypatch.setattr(session.vision.module, "get_image_features", broken)
    with pytest.raises(StageFailed, match="injected"):
        session.extend(ids[:129], images=images)
    assert session.position == 0


def test_a_session_without_a_tower_refuses_pictures_and_reads_text() -> None:
    model = hybrid_model("qwen3.5-vl")
    session = open_session(model, EngineConfig(devices=("cpu",), context_tokens=256))
    ids, images = put_pictures(model, token_ids(130))
    with pytest.raises(ValueError, match="no vision tower"):
        session.extend(ids[:129], images=images)
    assert session.position == 0
    assert_same(read_and_decode(session, token_ids(20)), read_and_decode(tiny_session(1, model), token_ids(20)))
    assert processor_of(hybrid_model("gemma3")) is None
