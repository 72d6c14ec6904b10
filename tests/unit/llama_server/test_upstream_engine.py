"""The sidecar's engine against a llama-server without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parkd.engine_adapter.llama_server.engine import LlamaServerEngine
from parkd.engine_adapter.llama_server.probe import new_file_name, remove_leftovers
from parkd.errors import EngineFailure, EngineLost, ModelError, RestoreFailed, UpstreamFailed
from parkd.state import RowRun, StageTransfer, StateFile, Transfer
from parkd.types import SamplingParams, TokenIds
from tests.unit.llama_server.upstream_kit import FakeLlama, expected_answer, ok, refusal, routed, slot_file

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeLlama]:
    server = FakeLlama(tmp_path)
    with routed() as router:
        server.mount(router)
        yield server


def prompt_of(text: str) -> TokenIds:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def turn(engine: LlamaServerEngine, prompt: TokenIds, limit: int = 12, stop: tuple[str, ...] = ()) -> tuple[int, str]:
    """Where it started and what it said; the engine is cut to what it shares with the prompt before."""
    engine.awake()
    reused = engine.begin(prompt, GREEDY, limit=limit)
    engine.extend(prompt[engine.position : -1], cancel=threading.Event())
    stream, text = engine.text_stream(), ""
    steps = engine.generate()
    for step in steps:
        text += stream.push(step)
        if any(mark in text for mark in stop) or any(token in engine.info.end_token_ids for token in step):
            break
    steps.close()
    return reused, text + stream.flush()


def capture(engine: LlamaServerEngine, path: Path) -> Transfer:
    """Parks what is live; the transfer that restores it."""
    position, size = engine.position, engine.state_sizes(()).whole

    def transfer(size: int, **sums: object) -> Transfer:
        run = RowRun(0, position, np.empty(0, np.uint8), StateFile(path, size))
        return Transfer(engine.info.layout.digest, 0, position, 256, (StageTransfer((run,)),), **sums)

    checksums = engine.capture(transfer(size))
    assert path.stat().st_size == checksums.file_bytes <= size
    return transfer(checksums.file_bytes, checksums=checksums.rows, fixed_checksums=checksums.fixed)


def test_a_prompt_is_read_once_and_what_follows_it_alone(server: FakeLlama) -> None:
    engine = server.engine()
    first = prompt_of("a conversation of some length, so that it takes several batches to be read by the server " * 2)
    assert turn(engine, first) == (0, expected_answer(first.tolist(), 12))
    live = engine.position
    assert live > len(first)
    said = np.array(server.slots[0].ids, dtype=np.int64)
    second = np.concatenate([said[:live], prompt_of(" and more")])
    before = server.read_tokens
    assert turn(engine, second) == (live, expected_answer(second.tolist(), 12))
    assert server.read_tokens - before == len(second) - live


def test_what_was_cut_is_read_again_and_the_answer_is_as_if_alone(server: FakeLlama) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the same head, the first tail"))
    engine.truncate(15)
    other = prompt_of("the same head, another tail")
    assert turn(engine, other) == (15, expected_answer(other.tolist(), 12))


def test_a_reset_forgets_also_what_the_server_still_holds(server: FakeLlama) -> None:
    engine = server.engine()
    prompt = prompt_of("what one client said is not told another by how fast the answer comes")
    turn(engine, prompt)
    engine.reset()
    assert turn(engine, prompt)[0] == 0
    assert server.bodies[-1]["cache_prompt"] is False


def test_a_stop_string_leaves_the_position_that_the_server_says(server: FakeLlama) -> None:
    engine = server.engine()
    server.script = "one two three four five"
    prompt = prompt_of("count")
    _, text = turn(engine, prompt, limit=30, stop=("three",))
    assert text.startswith("one two three")
    assert engine.position <= len(server.slots[0].ids)
    np.testing.assert_array_equal(engine.slot.ids, server.slots[0].ids[: engine.position])


def test_ids_of_half_characters_are_read_back_from_the_slot(server: FakeLlama) -> None:
    engine = server.engine()
    server.script = "a🙂b"
    prompt = prompt_of("smile")
    engine.begin(prompt, GREEDY, limit=30)
    engine.extend(prompt[:-1], cancel=threading.Event())
    stream = engine.text_stream()
    steps = engine.generate()
    got = [(list(step), stream.push(step)) for step in steps]
    ids = [token for step, _ in got for token in step]
    assert ids == [*"a🙂b".encode(), *engine.info.end_token_ids]
    assert "".join(text for _, text in got) == "a🙂b"
    assert engine.position == len(prompt) + len(ids) - 1
    assert engine.slot.is_exact


def test_a_parked_conversation_comes_back_as_it_was(server: FakeLlama, tmp_path: Path) -> None:
    server.slots = server.slots[:1]
    engine = server.engine()
    first = prompt_of("the first conversation, which will leave and come back")
    turn(engine, first)
    live = engine.slot.ids
    parked = capture(engine, tmp_path / "store.extent")
    engine.reset()
    turn(engine, prompt_of("another one that takes its place"))
    engine.restore(parked)
    assert engine.position == len(live)
    again = np.concatenate([live, prompt_of(" further")])
    assert turn(engine, again) == (len(live), expected_answer(again.tolist(), 12))
    assert (tmp_path / "store.extent").read_bytes() == slot_file(live.tolist())
    assert not list(tmp_path.glob("parkd-*"))


def test_with_several_slots_what_left_comes_back_without_its_file(server: FakeLlama, tmp_path: Path) -> None:
    engine = server.engine()
    first, second = prompt_of("the first conversation"), prompt_of("the second conversation")
    turn(engine, first)
    parked = capture(engine, tmp_path / "a.extent")
    engine.reset()
    turn(engine, second)
    other = capture(engine, tmp_path / "b.extent")
    server.calls.clear()
    engine.restore(parked)
    engine.restore(other)
    engine.restore(parked)
    assert "restore" not in server.calls
    again = np.concatenate([engine.slot.ids, prompt_of("!")])
    assert turn(engine, again)[1] == expected_answer(again.tolist(), 12)


def test_a_slot_that_someone_else_used_is_not_believed(server: FakeLlama, tmp_path: Path) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    live = engine.slot.ids
    parked = capture(engine, tmp_path / "a.extent")
    engine.reset()
    turn(engine, prompt_of("the second conversation"))
    server.slots[0].ids, server.slots[0].task = [1, 2, 3], 99
    engine.restore(parked)
    assert "restore" in server.calls
    again = np.concatenate([live, prompt_of("!")])
    assert turn(engine, again) == (len(live), expected_answer(again.tolist(), 12))


def test_a_restart_is_noticed_before_the_next_turn(server: FakeLlama, tmp_path: Path) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    live = engine.slot.ids
    parked = capture(engine, tmp_path / "a.extent")
    server.restart()
    engine.watch.doubt()
    engine.awake()
    assert engine.position == 0
    engine.restore(parked)
    again = np.concatenate([live, prompt_of("!")])
    assert turn(engine, again) == (len(live), expected_answer(again.tolist(), 12))


def test_a_restart_that_went_unnoticed_costs_a_read_and_no_more(server: FakeLlama) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    again = np.concatenate([engine.slot.ids, prompt_of("!")])
    server.restart()
    assert turn(engine, again) == (0, expected_answer(again.tolist(), 12))
    live = engine.position
    engine.watch.doubt()
    engine.awake()
    assert engine.position == live > len(again)


def test_another_model_under_the_same_address_ends_the_engine(server: FakeLlama) -> None:
    engine = server.engine()
    server.restart()
    server.model_path = "/models/other.gguf"
    engine.watch.doubt()
    with pytest.raises(EngineLost, match="another model"):
        engine.awake()


def test_another_adapter_ends_the_engine(server: FakeLlama) -> None:
    engine = server.engine()
    server.adapters = [{"id": 0, "path": "/models/lora.gguf", "scale": 0.5}]
    engine.watch.doubt()
    with pytest.raises(EngineLost, match="adapter"):
        engine.awake()


def test_a_client_that_leaves_keeps_what_was_read(server: FakeLlama) -> None:
    server.batch = 16
    engine = server.engine()
    prompt = prompt_of("a prompt that takes many batches, of which only the first few are read " * 2)
    cancel = threading.Event()
    engine.begin(prompt, GREEDY, limit=8)
    engine.extend(prompt[:-1], cancel=cancel, on_chunk=lambda position: cancel.set() if position >= 32 else None)
    assert 32 <= engine.position < len(prompt) - 1
    kept = engine.position
    assert turn(engine, prompt) == (kept, expected_answer(prompt.tolist(), 12))


def test_a_prompt_alone_leaves_exactly_its_state(server: FakeLlama) -> None:
    engine = server.engine()
    prompt = prompt_of("read and keep, answer nothing")
    assert engine.begin(prompt, GREEDY, limit=0) == 0
    engine.extend(prompt[:-1], cancel=threading.Event())
    assert server.slots[0].ids == prompt[:-1].tolist()
    assert engine.position == len(prompt) - 1


def test_a_damaged_file_is_refused_before_the_server_sees_it(server: FakeLlama, tmp_path: Path) -> None:
    server.slots = server.slots[:1]
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    parked = capture(engine, tmp_path / "a.extent")
    engine.reset()
    data = bytearray((tmp_path / "a.extent").read_bytes())
    data[-3] ^= 1
    (tmp_path / "a.extent").write_bytes(data)
    server.calls.clear()
    with pytest.raises(RestoreFailed, match="checksum"):
        engine.restore(parked)
    assert "restore" not in server.calls
    assert engine.position == 0


def test_a_restore_that_reports_fewer_tokens_fails(server: FakeLlama, tmp_path: Path) -> None:
    server.slots = server.slots[:1]
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    parked = capture(engine, tmp_path / "a.extent")
    engine.reset()
    size = (tmp_path / "a.extent").stat().st_size
    server.answers["restore"] = lambda _: ok({"id_slot": 0, "n_restored": 3, "n_read": size})
    with pytest.raises(RestoreFailed, match="restored 3 tokens"):
        engine.restore(parked)
    assert engine.position == 0


def test_a_slot_that_lost_its_state_after_a_restore_is_told(server: FakeLlama, tmp_path: Path) -> None:
    server.slots = server.slots[:1]
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    live = engine.slot.ids
    parked = capture(engine, tmp_path / "a.extent")
    engine.reset()
    engine.restore(parked)
    server.slots[0].ids = live[:5].tolist()
    again = np.concatenate([live, prompt_of("!")])
    assert turn(engine, again) == (5, expected_answer(again.tolist(), 12))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(500, "Unable to save slot", "server_error"), "disk full"),
        (ok({"id_slot": 0, "n_saved": 30, "n_written": 4096}), "moved to its place"),
    ],
)
def test_a_save_that_fails_parks_nothing(server: FakeLlama, tmp_path: Path, answer: object, message: str) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    position = engine.position
    server.answers["save"] = lambda _: answer
    with pytest.raises(EngineFailure, match=message):
        capture(engine, tmp_path / "a.extent")
    assert not (tmp_path / "a.extent").exists()
    assert not list(tmp_path.glob("parkd-*"))
    assert engine.position == position


def test_a_file_cut_short_by_a_full_disk_parks_nothing(server: FakeLlama, tmp_path: Path) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))

    def short(request: object) -> object:
        answer = server.act_on_slot(0, "save", {"filename": "parkd-short.slot"})
        name = __import__("json").loads(request.content)["filename"]
        (tmp_path / "parkd-short.slot").rename(tmp_path / name)
        with (tmp_path / name).open("r+b") as file:
            file.truncate(100)
        return answer

    server.answers["save"] = short
    with pytest.raises(EngineFailure, match="is incomplete"):
        capture(engine, tmp_path / "a.extent")
    assert not (tmp_path / "a.extent").exists()


def test_a_slot_with_foreign_tokens_is_not_parked(server: FakeLlama, tmp_path: Path) -> None:
    engine = server.engine()
    turn(engine, prompt_of("the first conversation"))
    server.slots[0].ids = list(range(len(server.slots[0].ids)))
    with pytest.raises(EngineFailure, match="only client"):
        capture(engine, tmp_path / "a.extent")
    assert engine.position == 0


def test_a_failure_in_the_middle_of_an_answer_leaves_what_the_server_holds(server: FakeLlama) -> None:
    engine = server.engine()
    prompt = prompt_of("the first conversation")

    def broken(events: Iterator[bytes]) -> Iterator[bytes]:
        for number, event in enumerate(events):
            if number == 6:
                yield b'error: {"message": "compute error", "type": "server_error"}\n\n'
                return
            yield event

    server.cut = broken
    with pytest.raises(UpstreamFailed, match="compute error"):
        turn(engine, prompt)
    server.cut = lambda events: events
    position = engine.position
    assert engine._completion is None
    np.testing.assert_array_equal(engine.slot.ids, server.slots[0].ids[:position])
    assert turn(engine, np.concatenate([engine.slot.ids, prompt_of("!")]))[0] == position


def test_steering_by_request_is_refused(server: FakeLlama) -> None:
    with pytest.raises(Exception, match="control vectors"):
        server.engine().steering_digest({"calm": 1.0})


def test_a_server_that_clears_idle_slots_is_told_by_its_flag(server: FakeLlama) -> None:
    original = server.complete

    def clearing(request: object) -> object:
        body = __import__("json").loads(request.content)
        for number, slot in enumerate(server.slots):
            if number != body["id_slot"]:
                slot.ids = []
        return original(body)

    server.answers["/completion"] = clearing
    with pytest.raises(ModelError, match="--cache-ram 0"):
        server.engine()


def test_found_by_use_15_only_its_own_files_are_removed_from_the_slot_directory(tmp_path: Path) -> None:
    """Issue 22, item 15, its kind: a slot that the user saved under a name that begins and ends alike."""
    for name in ("parkd-notes.slot", "parkd-0123456789abcdef.slot.old", "slot"):
        (tmp_path / name).touch()
    left = new_file_name()
    (tmp_path / left).touch()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"parkd-notes.slot", "parkd-0123456789abcdef.slot.old", "slot"}
