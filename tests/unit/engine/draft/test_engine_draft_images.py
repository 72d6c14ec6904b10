"""A draft head beside a model that reads pictures: their rows and positions are in what it guesses from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import Session, capture, host_transfer, restore
from parkd_engine.vision.tower import PromptImage
from transformers.cache_utils import MtpCache

from tests.unit.engine.kit.core_models import assert_same, token_ids
from tests.unit.engine.kit.draft_models import decoder, drafting, drafting_session, greedy, guessed, say
from tests.unit.engine.kit.vision_models import IMAGE_ID, processor_of, put_pictures

FAMILY = "qwen3.5-vl"
BOTH = pytest.mark.parametrize("family", [FAMILY, "qwen4-exp-vl"])
"""The second head is ours, and reads residual streams through an index."""
PROMPT = 130
Pictures = tuple[PromptImage, ...]


def prompt(family: str = FAMILY) -> tuple[npt.NDArray[np.int64], Pictures]:
    ids, images = put_pictures(drafting(family)[0], token_ids(PROMPT, 3))
    assert len(images) == 2
    return ids, images


def read(session: Session, ids: npt.NDArray[np.int64], images: Pictures) -> None:
    session.reset()
    session.extend(ids[:-1], images=images)


def oracle(ids: npt.NDArray[np.int64], images: Pictures) -> torch.Tensor:
    """The head's scores for what follows `ids`, `[vocab]`, at the positions that the library finds for the prompt."""
    model, head = drafting(FAMILY)
    processor = processor_of(model)
    assert processor is not None
    pixels = [processor.pixels(image.data) for image in images]
    grids, values = torch.cat([each.grid for each in pixels]), torch.cat([each.values for each in pixels])
    tokens, kinds = torch.from_numpy(ids)[None], torch.from_numpy((ids == IMAGE_ID).astype(np.int64))[None]
    with torch.inference_mode():
        places, _ = model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)
        hidden = model.model(
            tokens, pixel_values=values, image_grid_thw=grids, mm_token_type_ids=kinds, position_ids=places
        ).last_hidden_state
        embedded = model.get_input_embeddings()(tokens)
        embedded[tokens == IMAGE_ID] = torch.cat(model.get_image_features(values, grids).pooler_output)
        # Without a cache the library takes places that do not ascend by one for several prompts in one.
        cache = MtpCache(config=model.config.get_mtp_config())
        output = head.forward_layer(0, hidden[:, :-1], places[:, :, 1:], cache, inputs_embeds=embedded[:, 1:])
        logits: torch.Tensor = model.get_output_embeddings()(output[:, -1])[0]
    return logits


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("batch_tokens", [7, 256])
def test_guesses_are_those_of_the_librarys_head(stages: int, batch_tokens: int) -> None:
    """Behind pictures, whichever chunks they lay in, and behind a guess."""
    ids, images = prompt()
    session = drafting_session(FAMILY, stages, batch_tokens=batch_tokens)
    read(session, ids, images)
    [mine] = guessed(session, int(ids[-1]))
    torch.testing.assert_close(mine, oracle(ids, images), atol=1e-4, rtol=0)
    following = int(session.step(int(ids[-1])).argmax())
    [mine] = guessed(session, following)
    torch.testing.assert_close(mine, oracle(np.append(ids, following), images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
@pytest.mark.parametrize("stages", [1, 3])
@BOTH
def test_greedy_answers_are_those_without_guessing(family: str, stages: int, kv_format: str | None) -> None:
    ids, images = prompt(family)
    session = drafting_session(family, stages, echo=True, kv_format=kv_format)
    read(session, ids, images)
    expected = greedy(session, ids, 20)
    read(session, ids, images)
    decoding = decoder(session, ids)
    assert say(decoding, int(ids[-1]), 20) == expected
    assert 0 < decoding.counts.accepted < decoding.counts.drafted


@BOTH
def test_guesses_are_the_same_after_a_restore(family: str) -> None:
    """Of a conversation with pictures, after one without: scores to the bit, answers, and guesses that were right."""
    ids, images = prompt(family)
    session = drafting_session(family, echo=True)
    results = []
    for leaves in (False, True):
        read(session, ids, images)
        first = say(decoder(session, ids), int(ids[-1]), 8)
        scores = guessed(session, first[-1], 3)
        if leaves:
            plan = host_transfer(session, session.position, block_tokens=32)
            sums = capture(session, plan)
            session.reset()
            session.extend(token_ids(100, seed=9))
            session.reset()
            restore(session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed))
            assert_same(guessed(session, first[-1], 3), scores)
        again = decoder(session, ids)
        results.append((first, say(again, first[-1], 16), again.counts))
    assert results[0] == results[1]
    assert results[0][2].accepted > 0
