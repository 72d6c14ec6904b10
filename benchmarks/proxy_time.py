"""The time of a request outside the engine: parse, render, tokenise, hash, match.

    python -m benchmarks.proxy_time [--repeats 15]

The prompt is a long chat (a system prompt, then user messages and answers). *Cold*: nothing of it was seen before.
*Next turn*: the last request plus an answer, whose remembered tokens are spliced in, and a question. *Again*: the same
request once more. Matching compares it, unit by unit, with the live conversation and with parked ones that share its
system prompt. The code is that of a real request, with the demo model's tokenizer and chat template, but without HTTP.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from parkd_engine.loading.gguf_tokenizer import save_tokenizer
from parkd_engine.words.chat import ChatTokenizer
from transformers import AutoTokenizer

from benchmarks import texts
from benchmarks.common import MIB, Goal, Result, Table, finish, machine, progress
from benchmarks.servers import demo_model
from parkd.engine_adapter.rendered import RenderedTemplate
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said
from parkd.lane.live_rows import LiveRows
from parkd.lane.start import Seated, decide_start
from parkd.model_files.gguf_metadata import read_metadata
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.state import BLOCK_TOKENS, Costs, StageLayout, StateLayout
from parkd.store.index import PrefixIndex
from parkd.store.records import Parked
from parkd.store.store import CANDIDATE_LIMIT
from parkd.types import PromptIdentity
from parkd.words.templates import ChatTemplate

SIZES = {"30k": 30_000, "86k": 86_000}
CHARACTERS_A_TOKEN = 3.92
SYSTEM_CHARACTERS = 8_000
USER_CHARACTERS = 2_400
ANSWER_CHARACTERS = 1_200
PARKED_SIBLINGS = 16
"""Parked conversations that share a prefix with the prompt and are compared unit by unit."""
GOAL_MS = 10.0
NEXT_MS, TOKENISE_MS = 15.0, 3.0
"""Goals for the next turn of the longest conversation: all parts, and tokenising with splicing alone."""
MEMO_BYTES, ANSWER_BYTES = 64 * MIB, 32 * MIB
BOUNDS = f"{MEMO_BYTES // MIB} and {ANSWER_BYTES // MIB} MiB"
END_TEXT = "<|im_end|>"
PARTS = ("parse", "render", "tokenise", "hash", "match")
WAYS = ("cold", "next turn", "again")
LAYOUT = StateLayout(tuple(StageLayout(15 * i, 15 * i + 15, 23_040, 0, bytes(16)) for i in range(2)), "xxh3-64")
COST = Costs(read_s=0.004, bytes_per_s=5e9)
FINGERPRINT = bytes(16)


def conversation(seed: int, tokens: int) -> list[dict[str, str]]:
    """Messages of about `tokens` tokens, ending with a question."""
    text = texts.document(seed, int(tokens * CHARACTERS_A_TOKEN))
    messages = [{"role": "system", "content": text[:SYSTEM_CHARACTERS]}]
    at = SYSTEM_CHARACTERS
    while at < len(text):
        role, size = ("user", USER_CHARACTERS) if len(messages) % 2 else ("assistant", ANSWER_CHARACTERS)
        messages.append({"role": role, "content": text[at : at + size]})
        at += size
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "What follows from that?"})
    return messages


def body_of(messages: list[dict[str, str]]) -> bytes:
    return orjson.dumps({"model": "any", "messages": messages, "stream": True, "temperature": 0})


@dataclass(frozen=True)
class Proxy:
    """The parts of the proxy that a request passes through."""

    dialect: OpenAIChat
    builder: IdentityBuilder

    def identify(self, body: bytes) -> tuple[PromptIdentity, dict[str, float]]:
        """The prompt's identity, and the milliseconds of each part except for matching."""
        started = time.perf_counter()
        document: dict[str, Any] = orjson.loads(body)
        request = self.dialect.parse(document, {})
        parse_s = time.perf_counter() - started
        identity, parts = self.builder.build_timed(request)
        seconds = {"parse": parse_s, "render": parts.render_s, "tokenise": parts.tokenise_s, "hash": parts.hash_s}
        return identity, {name: value * 1000 for name, value in seconds.items()}


def parked_of(identity: PromptIdentity, stop: int, name: str) -> Parked:
    blocks = tuple(range(-(-stop // BLOCK_TOKENS)))
    return Parked(
        id=name,
        key_digest=identity.key.digest,
        units=identity.units[:stop],
        prefix_hashes=identity.prefix_hashes[: stop // BLOCK_TOKENS],
        blocks=blocks,
        checkpoints=(),
        layout_digest=LAYOUT.digest,
        parked_at_s=0.0,
        last_used_s=0.0,
    )


def match_ms(prompt: PromptIdentity, known: PromptIdentity, live: PromptIdentity, outcome_min: int) -> float:
    """Milliseconds of the decision, with the matching conversation among its siblings and another one live."""
    length = min(len(known), len(prompt))
    siblings = [parked_of(known, length * (i + 1) // (PARKED_SIBLINGS + 1), f"s{i}") for i in range(PARKED_SIBLINGS)]
    candidates = [parked_of(known, len(known), "right"), *siblings]
    by_id = {parked.id: parked for parked in candidates}
    index = PrefixIndex()
    for parked in candidates:
        index.add(parked.id, parked.key_digest, parked.prefix_hashes)
    elsewhere = LiveRows(live.key, live.units)
    started = time.perf_counter()
    found = [by_id[name] for name, _ in index.find(prompt.key.digest, prompt.prefix_hashes, CANDIDATE_LIMIT)]
    start = decide_start(prompt, [Seated(elsewhere)], found, layout=LAYOUT, cost=COST)
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert start.position >= outcome_min, "the parked conversation was not found"
    return elapsed_ms


def measure(
    tokenizer: Any, tokens: int, repeats: int
) -> tuple[int, dict[str, dict[str, list[float]]], dict[str, list[int]]]:
    memory: dict[str, list[int]] = {"memo": [], "answers": []}
    measured: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in WAYS}
    template = RenderedTemplate(ChatTemplate(tokenizer, None))
    messages = conversation(4000, tokens)
    first = body_of(messages)
    answer = texts.document(4001, ANSWER_CHARACTERS)
    grown = body_of(texts.next_turn(messages, answer, "And what then?"))
    other = body_of(conversation(4002, 2_000))
    prompt_tokens = 0
    for _ in range(repeats):
        words = ChatTokenizer(tokenizer)
        answers = OutputMemory(ANSWER_BYTES, [END_TEXT])
        builder = IdentityBuilder(words, template, FINGERPRINT, BLOCK_TOKENS, MEMO_BYTES, answers=answers)
        proxy = Proxy(OpenAIChat(), builder)
        live, _ = proxy.identify(other)  # the first request also compiles the template
        gc.collect()
        known: PromptIdentity | None = None
        for way, body in (("cold", first), ("next turn", grown), ("again", grown)):
            identity, parts = proxy.identify(body)
            known = known or identity
            if way == "cold":
                answers.remember(identity, words.encode(answer), Said((answer,)))
                builder.expect(identity, words.encode(answer), Said((answer,)))  # as a server does behind the reply
            expected = 0 if way == "cold" else int(0.99 * len(known))
            parts["match"] = match_ms(identity, known, live, expected)
            known = identity
            for part in PARTS:
                measured[way][part].append(parts[part])
        prompt_tokens = len(identity)
        assert answers.spliced == 2, "the answer was not found again"
        memory["memo"].append(builder.memo_bytes)
        memory["answers"].append(answers.memory_bytes)
    return prompt_tokens, measured, memory


def demo_tokenizer() -> Any:
    """The demo model's tokenizer, without its weights."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(read_metadata(demo_model()), Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="time outside the engine")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    started = machine()
    how = " ".join(__doc__.split("\n\n")[2].split())
    result = Result("proxy_time", "Time outside the engine", how)
    tokenizer = demo_tokenizer()
    for name, tokens in SIZES.items():
        progress(f"{name} tokens ...")
        prompt_tokens, measured, memory = measure(tokenizer, tokens, options.repeats)
        rows = []
        for way in WAYS:
            medians = {part: statistics.median(measured[way][part]) for part in PARTS}
            rest = sum(value for part, value in medians.items() if part != "tokenise")
            rows.append((way, *(f"{medians[part]:.2f}" for part in PARTS), f"{rest:.2f}"))
            if name == "30k":
                claim = f"all but tokenising, {prompt_tokens:,} tokens, {way}"
                result.goals.append(Goal(claim, f"< {GOAL_MS:.0f} ms", f"{rest:.2f} ms", rest < GOAL_MS))
            elif way == "next turn":
                whole, tokenise = rest + medians["tokenise"], medians["tokenise"]
                claim = f"all, {prompt_tokens:,} tokens, {way}"
                result.goals.append(Goal(claim, f"<= {NEXT_MS:.0f} ms", f"{whole:.2f} ms", whole <= NEXT_MS))
                claim = f"tokenising and splicing, {prompt_tokens:,} tokens, {way}"
                met = tokenise <= TOKENISE_MS
                result.goals.append(Goal(claim, f"<= {TOKENISE_MS:.0f} ms", f"{tokenise:.2f} ms", met))
        columns = ("request", *(f"{part} ms" for part in PARTS), "all but tokenise ms")
        result.tables.append(Table(f"{prompt_tokens:,} tokens, medians", columns, tuple(rows)))
        memos = ", ".join(f"{kind} {max(sizes) / MIB:.1f} MiB" for kind, sizes in memory.items())
        result.notes.append(f"{prompt_tokens:,} tokens: kept between requests: {memos}; limits {BOUNDS}.")
        result.raw[name] = {"prompt_tokens": prompt_tokens, "milliseconds": measured, "memory_bytes": memory}
    finish(result, started)


if __name__ == "__main__":
    main()
