"""llama.cpp in process: what is reused, and that answers are those of a conversation that never left.

The reference is always the same engine without the interruption. Each case runs on a hybrid, on sliding windows, on
full attention and, where the file is named, on Gemma.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import anyio
import numpy as np
import pytest

from parkd.engine_adapter.llama_cpp.state_size import state_size
from parkd.errors import EngineFailure, ModelError, NothingAllowed
from parkd.types import SamplingParams
from tests.integration.api import disk_harness
from tests.integration.api.api_harness import MIB, Running, body_of, running, until
from tests.integration.llama.llama_cpp_kit import BATCH, left_by, loaded, opening, turn_after

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")
pytestmark = pytest.mark.anyio

TINY = "tiny-hybrid"
"""As the file of random weights names itself."""
MODELS = [
    "tiny",
    "tiny-sliding",
    pytest.param("smollm2", marks=pytest.mark.model),
    pytest.param("gemma", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama-cpp")


@pytest.fixture(scope="module", params=MODELS)
def loaded_engine(request: pytest.FixtureRequest, folder: Path):
    with loaded(request.param, folder) as engine:
        yield engine


@pytest.fixture
def engine(loaded_engine):
    loaded_engine.reset()
    return loaded_engine


async def uninterrupted(engine, *turns) -> list[str]:
    """The texts of turns that follow each other, with nothing between and no store."""
    engine.reset()
    async with running(engine, budget_bytes=0) as server:
        texts = [(await server.chat(turn, max_tokens=6)).text for turn in turns]
    engine.reset()
    return texts


async def test_logprobs_after_a_restore_are_those_from_before(engine) -> None:
    """Found by use 25: and they are those of the library's logits."""
    asked = body_of(opening("a"), max_tokens=4, logprobs=True, top_logprobs=3)
    async with running(engine) as server:

        async def scores() -> list:
            return (await server.client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["logprobs"]

        before = (await scores())["content"]
        await server.settled()
        await server.chat(opening("b"), max_tokens=4)
        await server.settled()
        assert (await scores())["content"] == before
    assert before
    for token in before:
        best = token["top_logprobs"][0]
        assert (best["bytes"], best["logprob"]) == (token["bytes"], token["logprob"]), "greedy: the best was taken"
        assert 0 < sum(np.exp(each["logprob"]) for each in token["top_logprobs"]) <= 1 + 1e-6


async def test_a_b_a_resumes_at_the_end_of_the_answer(engine) -> None:
    """Reports 1, 4, 5 and 16: each state comes back whole and is its own, nothing of it is read again, and a branch
    leaves it parked."""
    a1, b1 = opening("a"), opening("b")
    async with running(engine) as server:

        async def meanwhile() -> None:
            """B is asked again, in the same memory."""
            assert (await server.chat(b1, max_tokens=6)).text == said_of_b

        first = await server.chat(a1, max_tokens=6)
        said_of_b = (await server.chat(b1, max_tokens=6)).text
        a2 = turn_after(a1, first.text)
        second = await server.chat(a2, max_tokens=6)
        assert (second.cache, second.reused) == ("restored-ram", left_by(server, a1, 6))
        await meanwhile()
        branch = turn_after(a1, first.text, "Something else.")
        other = await server.chat(branch, max_tokens=6)
        assert (other.cache, other.reused) == ("restored-ram", resumable(server, branch, a2, a1, is_live=False))
        await meanwhile()
        again = await server.chat(a2, max_tokens=6)
        assert (again.cache, again.reused) == ("restored-ram", len(server.prompt_tokens(a2)) - 1)
        assert again.text == second.text
    assert await uninterrupted(engine, a1, a2) == [first.text, second.text]
    assert (await uninterrupted(engine, a1, branch))[1] == other.text


async def test_asking_again_costs_one_token_live_and_restored(engine) -> None:
    """Report 17, on every kind of memory."""
    a1 = opening("a")
    async with running(engine) as server:
        first = await server.chat(a1, max_tokens=6)
        prompt = len(server.prompt_tokens(a1))
        for before, cache in ((None, "live"), (opening("b"), "restored-ram")):
            if before is not None:
                await server.chat(before, max_tokens=6)
            again = await server.chat(a1, max_tokens=6)
            assert (again.cache, again.reused, again.text) == (cache, prompt - 1, first.text)


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_editing_the_last_message_reads_that_message(engine, is_elsewhere: bool) -> None:
    """Report 20. Where the memory cannot be cut, a checkpoint before the last user message is resumed."""
    a1 = opening("a")
    async with running(engine) as server:
        first = await server.chat(a1, max_tokens=6)
        asked = turn_after(a1, first.text, "What about the sea?")
        await server.chat(asked, max_tokens=6)
        if is_elsewhere:
            await server.chat(opening("b"), max_tokens=6)
        edited = turn_after(a1, first.text, "Where are the mountains?")
        answer = await server.chat(edited, max_tokens=6)
        assert answer.cache == ("restored-ram" if is_elsewhere else "live")
        assert answer.reused == resumable(server, edited, asked, a1, is_live=not is_elsewhere)
    assert (await uninterrupted(engine, a1, asked, edited))[-1] == answer.text


def resumable(server: Running, prompt, before, first, *, is_live: bool) -> int:
    """Tokens of `prompt` that are exact in the state `before` left, if they part in the last user message. `first` is
    the turn before.

    The memory is cut where they part, if it can be; a parked state with windows, and every recurrent one, is resumed at
    the checkpoint before that message; where the template's marks are plain text, messages are not told apart, and
    it is the end of the first answer.
    """
    engine = server.engine
    if not engine.info.layout.fixed_bytes or (is_live and engine.rewind_floor == 0):
        return shared(server.prompt_tokens(prompt), server.prompt_tokens(before))
    if "<|im_start|>" not in engine.tokenizer.special_tokens:
        return left_by(server, first, 6)
    head = engine.template.render(prompt[:-1], (), {}, add_generation_prompt=False).text
    return len(engine.tokenizer.encode(head))


def shared(one: list[int], other: list[int]) -> int:
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


async def test_two_prompts_under_a_block_reuse_their_own_tail(engine) -> None:
    """Report 2: whatever they share, each switch reads one token."""
    one, two = opening("x", 12), opening("x", 12)
    one[1]["content"] += " first ending"
    two[1]["content"] += " second, another"
    async with running(engine) as server:
        texts = [(await server.chat(prompt, max_tokens=6)).text for prompt in (one, two)]
        for prompt, text in ((one, texts[0]), (two, texts[1]), (one, texts[0])):
            answer = await server.chat(prompt, max_tokens=6)
            assert (answer.reused, answer.text) == (len(server.prompt_tokens(prompt)) - 1, text)


async def test_six_conversations_under_a_budget_for_three(engine) -> None:
    """Reports 3 and 4: any number of them takes turns, the budget holds, and every answer is right."""
    openings = {name: opening(name, 24) for name in "abcdef"}
    async with running(engine) as server:
        await server.chat(openings["a"], max_tokens=6)
        await server.settled()
        one = server.store.stats().bytes_in_use
        head = shared(server.prompt_tokens(openings["a"]), server.prompt_tokens(openings["b"]))
    engine.reset()
    budget = 3 * one + one // 2
    turns, seen, whole, fixed = {}, {}, set(), engine.info.layout.fixed_bytes
    async with running(engine, budget_bytes=budget, eviction_policy="lru") as server:
        firsts = {name: (await server.chat(messages, max_tokens=6)).text for name, messages in openings.items()}
        for name in "fedcba":
            turns[name] = turn_after(openings[name], firsts[name])
            await server.settled()
            ids = server.prompt_tokens(turns[name])
            parked = [entry.parked for entry in entries(server)]
            places = {*engine.checkpoints, *(each.position for entry in parked for each in entry.checkpoints)}
            can_cut = not fixed or engine.rewind_floor == 0  # a window that is not full yet reaches back to the start
            shared_place = head if can_cut else max((place for place in places if place <= head), default=0)
            is_whole = name == "f" or any(begins(entry.units, ids) for entry in parked)
            seen[name] = answer = await server.chat(turns[name], max_tokens=6)
            whole |= {name} if is_whole else set()
            assert answer.reused == (left_by(server, openings[name], 6) if is_whole else shared_place), name
            part = "message 2 (user)" if "<|im_start|>" in engine.tokenizer.special_tokens else "system"
            why = None if is_whole else f"differs from token {head} in {part}"
            assert answer.headers.get("x-parkd-why") == why, name
            assert server.store.stats().peak_bytes_allocated <= budget
    # The last one never left and the one before it is parked; the budget cannot have held them all.
    assert seen["f"].cache == "live"
    assert {"e", "f"} <= whole
    assert not {"a", "b"} <= whole
    for name in whole if engine.info.model_name != TINY else openings:
        first, second = await uninterrupted(engine, openings[name], turns[name])
        assert first == firsts[name], name
        # Quantised weights give other bits for other batches, so that what is read anew need not be said alike.
        if name in whole or engine.info.model_name == TINY:
            assert second == seen[name].text, name


def entries(server: Running) -> list:
    return list(server.store.table.in_ram.values())


def begins(units, ids: list[int]) -> bool:
    return units.tolist() == ids[: len(units)]


async def test_a_restart_finds_it_on_disk(engine, tmp_path: Path) -> None:
    """Report 3 as well: nothing is live, and the look-up finds what is parked all the same."""
    a1 = opening("a")
    async with disk_harness.running_on(tmp_path / "park", engine, disk_bytes=256 * MIB, ram_bytes=128 * MIB) as server:
        first = await server.chat(a1, max_tokens=6)
    engine.reset()
    async with disk_harness.running_on(tmp_path / "park", engine, disk_bytes=256 * MIB, ram_bytes=128 * MIB) as server:
        a2 = turn_after(a1, first.text)
        second = await server.chat(a2, max_tokens=6)
        assert (second.cache, second.reused) == ("restored-disk", left_by(server, a1, 6))
    assert await uninterrupted(engine, a1, a2) == [first.text, second.text]


async def test_a_damaged_state_is_a_miss_and_later_answers_are_right(engine) -> None:
    """Reports 11 and 15: it is compared before the library sees it, and a miss leaves nothing behind."""
    a1 = opening("a")
    a2 = b2 = a1
    # The comparison does not know models; one place is enough where answers take seconds.
    for where in ("head", "middle", "end") if engine.info.model_name == TINY else ("middle",):
        engine.reset()
        async with running(engine) as server:
            first = await server.chat(a1, max_tokens=6)
            await server.chat(opening("b"), max_tokens=6)
            damage(server, first_of(server, a1), where)
            a2 = turn_after(a1, first.text)
            second = await server.chat(a2, max_tokens=6)
            assert (second.cache, second.reused) == ("cold", 0), where
            assert "restore failed" in second.headers["x-parkd-why"]
            b2 = turn_after(opening("b"), "x")
            third = await server.chat(b2, max_tokens=6)
            assert third.cache == "restored-ram"
    assert (await uninterrupted(engine, a2))[0] == second.text
    assert (await uninterrupted(engine, opening("b"), b2))[1] == third.text


def first_of(server: Running, messages) -> object:
    ids = server.prompt_tokens(messages)
    return next(e.parked for e in entries(server) if begins(e.parked.units[: len(ids)], ids))


def damage(server: Running, parked, where: str) -> None:
    [run] = server.store.table.blocks.runs(parked.blocks, parked.position, writeable=True)[0]
    run.buffer[{"head": 5, "middle": run.buffer.size // 2, "end": run.buffer.size - 1}[where]] ^= 1


async def test_state_that_gives_no_scores_is_neither_gone_on_from_nor_parked(engine) -> None:
    """The end of the last layer's state becomes NaN, which all ones are, as float16 and as float32."""
    from parkd.engine_adapter.llama_cpp.sequence import WHOLE

    a1 = opening("a")
    async with running(engine) as server:
        first = await server.chat(a1, max_tokens=6)
        await server.settled()
        state = np.empty(engine.sequence.state_size(WHOLE), dtype=np.uint8)
        assert engine.sequence.read_state(state, WHOLE)
        state[-256:] = 0xFF
        engine.timeline.set(state, WHOLE, engine.position)
        a2 = turn_after(a1, first.text)
        failed = await server.client.post("/v1/chat/completions", json=body_of(a2, 6))
        assert failed.status_code == 500
        assert "not finite" in failed.text
        await server.settled()
        assert engine.position == 0
        second = await server.chat(a2, max_tokens=6)
        assert (second.cache, second.reused) == ("restored-ram", left_by(server, a1, 6))
    assert await uninterrupted(engine, a1, a2) == [first.text, second.text]


async def test_a_mask_that_allows_nothing_is_not_the_states_fault(engine) -> None:
    class Nothing:
        def allowed(self) -> np.ndarray:
            return np.zeros(engine.info.vocab_size, dtype=np.bool_)

    ids = np.arange(20, dtype=np.int64) + 3
    engine.extend(ids[:-1], cancel=threading.Event())
    engine.begin(ids, SamplingParams(temperature=0), mask=Nothing())
    with pytest.raises(NothingAllowed):
        next(iter(engine.generate()))
    assert engine.position == 20


async def test_a_state_the_library_refuses_is_a_miss(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 15: it is told as a failure, and what the library had taken of it is gone before anything is read."""
    from parkd.engine_adapter.llama_cpp.sequence import WHOLE

    a1, restore, left = opening("a"), engine.restore, []

    def restored(transfer) -> None:
        try:
            restore(transfer)
        finally:
            left.append((engine.position, engine.sequence.position, engine.checkpoints))

    async with running(engine) as server:
        first = await server.chat(a1, max_tokens=6)
        await server.chat(opening("b"), max_tokens=6)
        write = engine.sequence.write_state

        def refused(state, flags: int, *which: int, **settings) -> bool:
            return write(state, flags, *which, **settings) and flags != WHOLE

        monkeypatch.setattr(engine.sequence, "write_state", refused)
        monkeypatch.setattr(engine, "restore", restored)
        a2 = turn_after(a1, first.text)
        second = await server.chat(a2, max_tokens=6)
        assert (second.cache, second.reused) == ("cold", 0)
        assert "refused" in second.headers["x-parkd-why"]
        assert left == [(0, 0, ())]
    monkeypatch.undo()
    assert (await uninterrupted(engine, a2))[0] == second.text


async def test_a_client_that_leaves_stops_the_batch_and_what_was_read_stays(engine, monkeypatch) -> None:
    """Report 27: cancelled inside a batch; the whole batches before it are not read again, and that batch is."""
    decode, reached = engine.sequence.decode, threading.Event()

    def held(token_ids, start, *, is_cancelled=None) -> bool:
        """The third batch begins once its client is seen to have left: the library finds out inside it."""
        if start < 2 * BATCH or is_cancelled is None or reached.is_set():
            return decode(token_ids, start, is_cancelled=is_cancelled)
        reached.set()
        deadline = time.monotonic() + 20
        while not is_cancelled() and time.monotonic() < deadline:
            time.sleep(0.002)
        done = decode(token_ids, start, is_cancelled=is_cancelled)
        assert not done, "the batch was computed for nobody"
        return done

    monkeypatch.setattr(engine.sequence, "decode", held)
    async with running(engine) as server:
        longer = (opening("long", words) for words in range(70, 400, 10))
        long = next(prompt for prompt in longer if len(server.prompt_tokens(prompt)) > 2 * BATCH + 16)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body_of(long)))
            await until(reached.is_set)
            tasks.cancel_scope.cancel()
        await server.settled()
        again = await server.chat(long, max_tokens=6)
        assert (again.cache, again.reused) == ("live", 2 * BATCH)
    assert (await uninterrupted(engine, long))[0] == again.text


async def test_a_batch_is_aborted_inside_and_the_position_is_exact(engine) -> None:
    ids = np.arange(3, 131, dtype=np.int64) % 200 + 3
    engine.extend(ids[:100], cancel=threading.Event(), checkpoint_at=(64,))

    class SoonSet:
        """Set when asked for the second time: not before the batch, but inside it."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1

    position = engine.extend(ids[100:], cancel=SoonSet())
    assert position == engine.position == 100
    engine.extend(ids[position:], cancel=threading.Event())
    after_abort = engine.sequence.position
    engine.reset()
    engine.extend(ids, cancel=threading.Event())
    assert after_abort == engine.position == len(ids)


async def test_what_was_kept_of_a_conversation_goes_with_it(engine) -> None:
    """Report 4: however many take turns, none is cut to a state of another one."""
    one, other = (np.arange(60, dtype=np.int64) * step % 200 + 3 for step in (3, 7))
    engine.extend(one, cancel=threading.Event(), checkpoint_at=(20, 40))
    engine.reset()
    assert engine.checkpoints == ()
    engine.extend(other, cancel=threading.Event(), checkpoint_at=(30,))
    if engine.info.layout.fixed_bytes:
        assert engine.checkpoints == (30,)
    if engine.rewind_floor > 40:
        with pytest.raises(ValueError, match="not exact"):
            engine.truncate(40)


async def test_the_plan_s_sizes_are_those_that_the_library_reports(engine) -> None:
    config = engine.model.config
    planned = state_size(Path(config.model), *config.llama.cache_types)
    assert engine.info.layout.row_bytes == planned.row_bytes
    assert (planned.layers, planned.architecture) == (engine.model.layers, engine.info.architecture)
    fixed = engine.info.layout.fixed_bytes
    assert planned.fixed_bytes == pytest.approx(fixed, rel=0.02, abs=512)
    ids = np.arange(256, dtype=np.int64) % 200 + 3
    engine.extend(ids, cancel=threading.Event())
    if not engine.model.window_tokens:  # else the windows are not full yet
        whole = len(ids) * planned.row_bytes + planned.fixed_bytes
        assert engine.state_sizes(()).whole == pytest.approx(whole, rel=0.02, abs=512)


async def test_special_tokens_are_cut_out_and_the_rest_is_tokenised_alone(engine) -> None:
    """What the memo of segments counts on."""
    for text in ("<|im_start|>user\nHello  there <|im_end|>\n<|im_start|>assistant\n", " lead", "日本語 é\n\n x"):
        ids = engine.tokenizer.encode(text)
        assert engine.tokenizer.decode(ids) == text or "<|im_start|>" not in engine.tokenizer.special_tokens
    if "<|im_end|>" in engine.tokenizer.special_tokens:
        parts = ("<|im_start|>", "user\nHello  there ", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
        whole = engine.tokenizer.encode("".join(parts))
        assert whole == [token for part in parts for token in engine.tokenizer.encode(part)]


async def test_control_tokens_that_a_client_spells_are_letters(engine) -> None:
    """Found by use 9."""
    words = engine.tokenizer
    if "<|im_end|>" not in words.special_tokens:
        return
    control = frozenset(words.control_tokens) | {"<|im_start|>", "<|im_end|>"}
    parts = ["", "<|im_start|>", "user\nIs <|im_end|> one, <|im_start|>system\n?", "<|im_end|>", "\n"]
    ids = words.encode_parts(parts, control)
    meant = {token: words.encode(token)[0] for token in ("<|im_start|>", "<|im_end|>")}
    assert [token_id for token_id in ids if token_id in meant.values()] == list(meant.values())
    assert words.decode(ids) == "".join(parts)
    plain = ["", "<|im_start|>", "user\nHello  there ", "<|im_end|>", "\n"]
    assert words.encode_parts(plain, control) == words.encode("".join(plain))


async def test_answers_obey_a_schema_and_stop_strings(engine) -> None:
    from parkd.answers.base import OutputFormat
    from parkd.answers.structured import StructuredOutput

    structured = StructuredOutput(engine.tokenizer_json(), engine.info.vocab_size, engine.info.end_token_ids)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    build_mask = lambda request, tail, _: structured.mask(request, OutputFormat(), tail)  # noqa: E731
    async with running(engine, build_mask=build_mask) as server:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        answer = await server.chat(opening("a", 8), max_tokens=40, response_format=form)
        assert answer.text.replace(" ", "").replace("\n", "") in ('{"n":1}', '{"n":2}', '{"n":3}')
        free = await server.chat(opening("b", 8), max_tokens=12)
        if len(free.text) > 4:
            cut = free.text[2:4]
            stopped = await server.chat(opening("b", 8), max_tokens=12, stop=[cut])
            assert stopped.text == free.text[: free.text.index(cut)]


async def test_a_step_that_fails_never_goes_back_to_another_conversation(engine, monkeypatch) -> None:
    """What was noted in front of the last batch is of that batch alone, whatever else begins at its position."""
    one, other = (np.arange(61, dtype=np.int64) * step % 200 + 3 for step in (3, 7))
    never = threading.Event()
    engine.extend(other[:60], cancel=never)
    engine.begin(other[:61], SamplingParams(temperature=0))
    expected = next(iter(engine.generate()))
    expected_logits = engine.sequence.logits().copy()
    engine.reset()
    engine.extend(one[:40], cancel=never)
    engine.extend(one[40:60], cancel=never)
    engine.reset()
    engine.extend(other[:40], cancel=never)
    engine.begin(other[:41], SamplingParams())
    with monkeypatch.context() as broken:

        def fail(*_: object, **__: object) -> bool:
            raise EngineFailure("The library failed.")

        broken.setattr(engine.sequence, "decode", fail)
        with pytest.raises(EngineFailure):
            next(iter(engine.generate()))
    engine.extend(other[engine.position : 60], cancel=never)
    engine.begin(other[:61], SamplingParams(temperature=0))
    assert next(iter(engine.generate())) == expected
    assert np.allclose(engine.sequence.logits(), expected_logits, atol=1e-3)


def test_it_reads_in_chunks_of_its_own_when_none_are_asked_for(folder: Path) -> None:
    ends: list[int] = []
    with loaded("tiny", folder, batch_tokens=None) as engine:
        engine.extend(np.arange(600, dtype=np.int64) % 200 + 3, cancel=threading.Event(), on_chunk=ends.append)
    assert ends == [512, 600]


def test_a_context_above_the_models_is_capped_and_said(folder: Path) -> None:
    """The tiny models are made for 32,768 tokens; without a cap the memory of a terabyte would be asked for."""
    with loaded("tiny-dense", folder, context_tokens=100_000_000) as engine:
        assert engine.info.context_tokens == engine.info.model_tokens == 32768
        assert engine.notes == ("--ctx-size 100,000,000 is more than the model was made for: it has 32,768 tokens",)
    with loaded("tiny-dense", folder, context_tokens=1024) as engine:
        assert (engine.info.context_tokens, engine.notes) == (1024, ())


def test_coded_values_without_flash_attention_are_refused_by_their_reason(folder: Path) -> None:
    with (
        pytest.raises(ModelError, match="needs flash attention"),
        loaded("tiny", folder, cache_type_v="q8_0", flash_attn="off"),
    ):
        pass


def test_the_fingerprint_names_the_objects_that_this_process_computes_with(folder: Path, monkeypatch) -> None:
    from parkd.engine_adapter.llama_cpp import library

    with loaded("tiny", folder) as engine:
        own, _ = library.computing_objects(Path("/nowhere"))
        assert {"llama", "ggml", "ggml-base"} <= {path.name.removeprefix("lib").partition(".")[0] for path in own}
        before = engine.model.fingerprint()
        monkeypatch.setattr(library, "computing_objects", lambda _folder: (own[:-1], []))
        assert engine.model.fingerprint() != before
