"""What `parkd plan` promises is what the store holds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from parkd_engine.families.presets.shapes import PREFIX, preset_config
from parkd_engine.reading_work import reading_work

from parkd import cli
from parkd.cli.budget_table import lines
from parkd.cli.planning import sizes_of
from parkd.engine_adapter.llama_cpp.state_size import state_size
from parkd.errors import ModelError
from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes
from parkd.store.records import Capture, CaptureRequest, StoreConfig
from parkd.store.sizes import Sizes
from parkd.store.store import ConversationStore

MIB = 1 << 20


def layout(row_bytes=(4096, 2048), fixed_bytes=(0, 0)) -> StateLayout:
    stages = (
        StageLayout(index, index + 1, rows, fixed, bytes([index]) * 16)
        for index, (rows, fixed) in enumerate(zip(row_bytes, fixed_bytes, strict=True))
    )
    return StateLayout(tuple(stages), "planned")


def sizes_in(layout: StateLayout, budget: int, slots: int | None = None) -> Sizes:
    return Sizes(layout, StoreConfig(budget, 256, slots))


def park(store: ConversationStore, seed: int, tokens: int) -> int:
    """Tokens parked."""
    units = np.full(tokens, seed, np.uint64)
    hashes = tuple(bytes([seed]) * 8 + block.to_bytes(8, "big") for block in range(tokens // 256))
    fixed = store.layout.fixed_bytes > 0
    request = CaptureRequest(b"k" * 16, units, hashes, (), store.layout.digest, (tokens,) if fixed else ())
    capture = store.begin_capture(request)
    if not isinstance(capture, Capture):
        return 0
    shape = -(-capture.position // 256), len(store.layout.stages)
    sums = np.zeros(shape, np.uint64), np.zeros((int(fixed), shape[1]), np.uint64)
    store.commit(capture, Checksums(*sums))
    return capture.position


@pytest.mark.parametrize("fixed", [(0, 0), (100_000, 50_000)])
@pytest.mark.parametrize("budget", [8 * MIB, 37 * MIB, 100 * MIB])
def test_the_store_holds_what_the_plan_says_and_not_a_block_more(budget, fixed):
    sizes = sizes_in(layout(fixed_bytes=fixed), budget)
    longest = sizes.longest()
    assert park(ConversationStore(StoreConfig(budget, 256), sizes.layout, lambda: 0.0), 1, longest) == longest
    more = ConversationStore(StoreConfig(budget, 256), sizes.layout, lambda: 0.0)
    assert park(more, 1, longest + 256) < longest + 256
    count = sizes.count(1000)
    store = ConversationStore(StoreConfig(budget, 256), sizes.layout, lambda: 0.0)
    for seed in range(count):
        assert park(store, seed, 1000) == 1000
    assert (store.stats().conversations, store.stats().evictions_total) == (count, 0)
    park(store, count, 1000)
    assert store.stats().conversations == count


def test_the_lines_say_what_is_refused():
    text = "\n".join(lines("m", sizes_in(layout(), 8 * MIB, slots=2), 32_768, 512 * MIB))
    assert "in part   longer than" in text
    assert "conversation 3 while the other 2" in text
    assert "less than 512 MiB of memory free" in text
    rich = "\n".join(lines("m", sizes_in(layout(), 2048 * MIB), 32_768, 0))
    assert " blocks, 32,768 tokens in one conversation" in rich, "none is longer than the context"
    assert "parking is off" in "\n".join(lines("m", sizes_in(layout(), 0), 4096, 0))
    assert "refused   everything: one block" in "\n".join(lines("m", sizes_in(layout(), MIB), 4096, 0))


@pytest.mark.slow
def test_the_command_reads_a_configuration_and_no_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, '
        '"max_position_embeddings": 4096}'
    )
    words = ["plan", "--model", str(tmp_path), "--conversation-cache-mib", "64", "--devices", "cpu,cpu"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    # keys and values, 2 layers a stage, 2 heads of 16, float32
    assert "layers 0-1: 512 bytes a token | layers 2-3: 512 bytes a token" in said
    assert "context 4,096 tokens" in said
    assert cli.main(["plan", "--model", str(tmp_path / "none")]) == 2
    assert cli.main([*words, "--ctx-size", "4097"]) == 2
    assert "at most 4096" in capsys.readouterr().err
    sizes = sizes_of(["--model", str(tmp_path), "--devices", "cpu,cpu"])
    assert (sizes.row_bytes, sizes.fixed_bytes) == ((512, 512), (0, 0))
    # q, k, v, o; gate, up, down; two norms
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert sizes.read_flop == 2 * 4 * layer
    assert sizes.growth_flop == 4 * 4 * 64
    replayed = ["replay", "generate:round-robin?agents=2&turns=2", "--model", str(tmp_path), "--budgets", "64"]
    assert cli.main(replayed) == 0
    assert cli.main([*replayed, "--devises", "cpu"]) == 2


@pytest.mark.parametrize(("name", "key"), [("tiny-qwen3-next", "num_experts"), ("tiny-granite-h", "num_local_experts")])
def test_reading_meets_the_experts_that_a_token_is_sent_to(name, key):
    few, many = preset_config(f"{PREFIX}{name}"), preset_config(f"{PREFIX}{name}")
    setattr(many, key, 8)
    works = reading_work(few), reading_work(many)
    routers = 2 * 4 * 64 * 4  # 2 a parameter, 4 layers, 64 wide, 4 experts more to choose from
    assert works[1].flop - works[0].flop == routers
    assert works[0].growth_flop == 4 * few.num_attention_heads * (getattr(few, "head_dim", None) or 16)
    assert works[0].flop > routers


def write_header(path: Path, kind: str, **entries: int | list[bool]) -> Path:
    writer = gguf.GGUFWriter(path, kind)
    for name, value in {"block_count": 6, "context_length": 4096, "embedding_length": 64, **entries}.items():
        name = f"{kind}.{name.replace('__', '.')}"
        writer.add_array(name, value) if isinstance(value, list) else writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}
ROW = 2 * 2 * 16
"""Keys and values of a layer: two heads of 16."""
MAMBA = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}


@pytest.mark.parametrize(
    ("kind", "entries", "types", "row_bytes", "fixed_bytes"),
    [
        ("llama", {}, ("f16", "f16"), 6 * ROW * 2 + 12, 0),
        ("llama", {}, ("q8_0", "f32"), 6 * (34 + 128) + 12, 0),
        ("llama", {"attention__key_length": 32}, ("f16", "f16"), 6 * ROW * 3 + 12, 0),
        ("gemma3", {"attention__sliding_window": 100}, ("f16", "f16"), ROW * 2 + 12, 100 * (5 * ROW * 2 + 12)),
        (
            "gemma3n",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, False, False] * 2},
            ("f16", "f16"),
            4 * ROW * 2 + 12,
            8 * (2 * ROW * 2 + 12),
        ),
        ("qwen3next", MAMBA, ("f16", "f16"), ROW * 2 + 12, 5 * 4 * (3 * (128 + 32) + 16 * 128)),
        (
            "lfm2",
            {"shortconv__l_cache": 3, "attention__head_count_kv": [0, 2] * 3},
            ("f16", "f16"),
            396,
            3 * 4 * 2 * 64,
        ),
    ],
)
def test_the_header_of_a_gguf_file_tells_what_a_token_takes(tmp_path, kind, entries, types, row_bytes, fixed_bytes):
    found = state_size(write_header(tmp_path / "m.gguf", kind, **{**HEADS, **entries}), *types)
    assert (found.row_bytes, found.fixed_bytes, found.windows_not_counted) == (row_bytes, fixed_bytes, False)


def test_what_a_header_does_not_tell_is_said(tmp_path):
    window = write_header(tmp_path / "w.gguf", "qwen2", **HEADS, attention__sliding_window=8)
    assert state_size(window, "f16", "f16").windows_not_counted
    for kind, entry in (("deepseek2", "attention__kv_lora_rank"), ("rwkv7", "wkv__head_size")):
        path = write_header(tmp_path / f"{kind}.gguf", kind, **HEADS, **{entry: 64})
        with pytest.raises(ModelError, match="without loading it"):
            state_size(path, "f16", "f16")


@pytest.mark.parametrize("words", [["--engine", "llama.cpp"], [], ["--gpu-layers", "3"]])
def test_the_command_plans_for_the_engine_that_would_run(tmp_path, capsys, monkeypatch, words):
    path = write_header(tmp_path / "m.gguf", "llama", **HEADS)
    monkeypatch.setattr("parkd.cli.model.importlib.util.find_spec", lambda _name: object())
    types = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    command = ["plan", "--model", str(path), "--conversation-cache-mib", "4", *types, *words]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert "engine    llama.cpp, since" in told
    row_bytes = 6 * ROW * 4 + 12
    assert (
        f"{row_bytes:,} bytes a token; a block is 256 tokens of all stages, {256 * row_bytes + 24 * 7:,} bytes" in told
    )
    sidecar = ["--upstream", "http://127.0.0.1:1", "--slot-save-path", str(tmp_path)]
    assert cli.main(["plan", *sidecar, "--conversation-cache-disk-mib", "64"]) == 2
    assert "--engine llama.cpp --model FILE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--engine", "llama.cpp"], [], ["--gpu-layers", "3"]])
def test_a_replay_does_not_take_torchs_cost_for_llama_cpp(tmp_path, capsys, monkeypatch, words):
    path = write_header(tmp_path / "m.gguf", "llama", **HEADS)
    monkeypatch.setattr("parkd.cli.model.importlib.util.find_spec", lambda _name: object())
    assert cli.main(["replay", "generate:round-robin?agents=2&turns=2", "--model", str(path), *words]) == 2
    told = capsys.readouterr()
    assert "this would run on llama.cpp" in told.err
    assert "--bytes-per-token" in told.err
    assert told.out == ""


@pytest.mark.parametrize("fixed", [0, 300_000])
def test_the_store_holds_as_many_whole_states_as_the_plan_says(fixed):
    planned = StateLayout((StageLayout(0, 1, 4096, fixed, b""),), "planned", Grain.OPAQUE)
    sizes = sizes_in(planned, 37 * MIB)
    longest, count = sizes.longest(), sizes.count(1000)
    assert park_whole(whole_store(planned), 1, longest, fixed) == longest
    assert park_whole(whole_store(planned), 1, longest + 256, fixed) == 0
    store = whole_store(planned)
    for seed in range(count):
        assert park_whole(store, seed, 1000, fixed) == 1000
    assert (store.stats().conversations, store.stats().evictions_total) == (count, 0)
    park_whole(store, count, 1000, fixed)
    assert store.stats().conversations == count


def whole_store(layout: StateLayout) -> ConversationStore:
    return ConversationStore(StoreConfig(37 * MIB, 256), layout, lambda: 0.0)


def park_whole(store: ConversationStore, seed: int, tokens: int, fixed: int) -> int:
    """With one checkpoint besides the end, if there is fixed state; tokens parked."""
    units = np.full(tokens, seed, np.uint64)
    hashes = tuple(bytes([seed]) * 8 + block.to_bytes(8, "big") for block in range(tokens // 256))
    places = (tokens // 2, tokens) if fixed else ()
    sizes = StateSizes(tokens * 4096 + fixed, (fixed, 0) if fixed else ())
    request = CaptureRequest(b"k" * 16, units, hashes, (), store.layout.digest, places, sizes=sizes)
    capture = store.begin_capture(request)
    if not isinstance(capture, Capture):
        return 0
    store.commit(capture, Checksums(np.zeros((1, 1), np.uint64), np.zeros((len(places), 1), np.uint64)))
    return capture.position
