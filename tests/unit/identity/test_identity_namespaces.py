"""What is remembered of a request helps the key that sent it, and no other: counted in work, not in seconds."""

from __future__ import annotations

import base64
import gc
from typing import Any

import pytest

from parkd.identity import chain, images, splice, tokens
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said
from parkd.namespaces import ByNamespace
from parkd.state import ImageFacts
from parkd.types import ImageData, TurnRequest
from tests.fakes.images import IMAGE_TOKEN, FakeImages
from tests.fakes.text import SPECIAL_TOKENS, FakeTemplate, FakeTokenizer
from tests.unit.identity.identity_fakes import BLOCK, FINGERPRINT, ChatMl, WordTokenizer, say, talk

SECRET = "the long text that one key has sent " * 40


def builder_of(words: WordTokenizer, namespaces: int = 2, memo_bytes: int = 1 << 20) -> IdentityBuilder:
    return IdentityBuilder(words, ChatMl(), FINGERPRINT, BLOCK, memo_bytes, namespaces=namespaces)


def work_for(builder: IdentityBuilder, words: WordTokenizer, namespace: str, text: str) -> int:
    """Characters that are tokenised for a request of this namespace."""
    words.texts_encoded.clear()
    builder.build(talk(say("user", text), namespace=namespace))
    return sum(map(len, words.texts_encoded))


def test_found_by_use_2_tokenising_takes_as_much_work_whoever_sent_the_text_before() -> None:
    """12 kB took 9.4 ms if another namespace's key had sent them, and 23.7 ms else: one memo for all."""
    words = WordTokenizer()
    builder = builder_of(words)
    work_for(builder, words, "alice", "hello")
    first = work_for(builder, words, "alice", SECRET)
    work_for(builder, words, "bob", "hello")
    assert work_for(builder, words, "bob", SECRET) == first >= len(SECRET)
    for namespace in ("alice", "bob"):
        assert work_for(builder, words, namespace, SECRET) == 0, "its own texts are known"


def test_found_by_use_2_the_parts_of_a_namespace_for_salts_are_apart_too() -> None:
    words = WordTokenizer()
    builder = builder_of(words)
    for namespace in ("alice", "alice/one", "alice/two"):
        work_for(builder, words, namespace, "hello")
    first = work_for(builder, words, "alice/one", SECRET)
    assert work_for(builder, words, "alice/two", SECRET) == first >= len(SECRET)
    assert work_for(builder, words, "alice", SECRET) == first
    assert work_for(builder, words, "alice/one", SECRET) == 0


def test_found_by_use_2_no_key_pushes_out_what_is_remembered_of_another() -> None:
    words = WordTokenizer()
    builder = builder_of(words, memo_bytes=64_000)
    work_for(builder, words, "alice", SECRET)
    for number in range(100):
        work_for(builder, words, f"bob/{number}", f"{number} {SECRET}")
    assert builder.memo_bytes <= 64_000
    assert work_for(builder, words, "alice", SECRET) == 0


def test_found_by_use_2_trails_of_answers_are_by_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TEXTS_KEPT", 8)
    """A trail of its own that another key pushed out would have to be hashed again."""
    words = FakeTokenizer()
    memory = OutputMemory(1 << 20, SPECIAL_TOKENS)
    builder = IdentityBuilder(words, FakeTemplate(), FINGERPRINT, BLOCK, 1 << 20, answers=memory, namespaces=2)
    looked: list[bytes] = []
    found = memory.found
    memory.found = lambda prefix: (looked.append(prefix), found(prefix))[1]  # type: ignore[method-assign]

    def turns(namespace: str, text: str) -> int:
        """Answers whose place in the prompt is hashed."""
        before = len(set(looked))
        builder.build(talk(say("user", text), say("assistant", "yes"), say("user", "on"), namespace=namespace))
        return len(set(looked)) - before

    assert turns("alice", "hello") == 1
    for number in range(tokens.TEXTS_KEPT + 1):
        assert turns("bob", f"{number}") == 1
    assert len(builder._memories.of("alice").trails) == 1
    gc.collect()
    assert len(builder._memories.of("bob").trails) == tokens.TEXTS_KEPT, "a trail is kept as long as its text"


def test_a_conversation_among_many_others_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what is hashed: of the next turn of each of 40 agents, only what is new."""
    hashed: list[int] = []
    blocks: list[int] = []
    int32, extend = splice.int32, chain.extend_hashes

    def counted(ids: Any) -> Any:
        hashed.append(len(ids))
        return int32(ids)

    def extended(previous: tuple[bytes, ...], units: Any, key: bytes, block: int) -> tuple[bytes, ...]:
        blocks.append(len(units) // block - len(previous))
        return extend(previous, units, key, block)

    monkeypatch.setattr(splice, "int32", counted)
    monkeypatch.setattr(chain, "extend_hashes", extended)
    words = WordTokenizer()
    memory = OutputMemory(1 << 20, ["<|end|>"])
    builder = IdentityBuilder(words, ChatMl(), FINGERPRINT, BLOCK, 32 << 20, answers=memory)
    system = say("system", "the same long instructions for all " * 20)
    talks = [[system, say("user", f"I am agent {agent}. " + f"word{agent} " * 50)] for agent in range(40)]
    for turn in range(4):
        hashed.clear()
        blocks.clear()
        for messages in talks:
            builder.build(talk(*messages))
            messages += [say("assistant", f"yes, {turn}"), say("user", f"and then, {turn}?")]
        if turn > 1:
            assert sum(hashed) / len(talks) < 30, "an answer and a question"
            assert max(blocks) <= 30 // BLOCK


class Counting(FakeImages):
    def __init__(self, token_id: int) -> None:
        super().__init__(token_id)
        self.decoded: list[bytes] = []

    def facts(self, data: bytes) -> ImageFacts:
        self.decoded.append(data)
        return super().facts(data)


def test_found_by_use_2_an_image_is_decoded_for_each_namespace_that_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FACTS_KEPT", 2)
    words = FakeTokenizer((*SPECIAL_TOKENS, IMAGE_TOKEN))
    reader = Counting(*words.encode(IMAGE_TOKEN))
    builder = IdentityBuilder(words, FakeTemplate(), FINGERPRINT, BLOCK, 1 << 20, images=reader, namespaces=2)

    def decoded_for(namespace: str, *pictures: bytes) -> int:
        reader.decoded.clear()
        parts = [{"type": "image", "image": ImageData(base64.b64encode(data).decode(), "there")} for data in pictures]
        content = [*parts, {"type": "text", "text": "what?"}]
        builder.build(TurnRequest(messages=[{"role": "user", "content": content}], namespace=namespace))
        return len(reader.decoded)

    assert [decoded_for(who, b"PIC1") for who in ("alice", "alice", "bob", "bob/salt", "bob")] == [1, 0, 1, 1, 0]
    assert decoded_for("bob", b"PIC2", b"PIC3") == 2
    assert [decoded_for(who, b"PIC1") for who in ("alice", "bob")] == [0, 1], "each has room of its own"
    assert 0 < builder.images_bytes <= builder.images_limit_bytes


def test_as_many_namespaces_are_remembered_as_there_are_keys_for() -> None:
    made: list[str] = []

    def make(namespace: str) -> list[int]:
        made.append(namespace)
        return []

    memories = ByNamespace(make, most=2)
    for namespace in ("a", "b", "a/salt", "c", "a", "b"):
        memories.of(namespace)
    assert made == ["a", "b", "c", "b"], "the least recently used left"
    assert len(memories.all()) == 2


def test_an_answer_is_expected_in_its_own_namespace() -> None:
    words = WordTokenizer()
    builder = builder_of(words)
    prompt = builder.build(talk(say("user", "hi"), namespace="alice"))
    answer = SECRET.strip()
    builder.expect(prompt, words.encode(answer), Said((answer,), "", ()))
    again = [say("user", "hi"), say("assistant", answer), say("user", "on")]
    counts = []
    for namespace in ("alice", "bob"):
        words.texts_encoded.clear()
        builder.build(talk(*again, namespace=namespace))
        counts.append(sum(map(len, words.texts_encoded)))
    assert counts[0] < len(answer) <= counts[1]
