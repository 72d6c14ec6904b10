"""What `parkd plan` promises is what the store holds."""

from __future__ import annotations

import numpy as np
import pytest

from engine.presets import PREFIX, preset_config
from engine.reading_work import reading_work
from parkd import cli
from parkd.cli.planning import sizes_of
from parkd.plan import Sizes, lines
from parkd.store.records import Capture, CaptureRequest, StoreConfig
from parkd.store.store import ConversationStore
from parkd.types import Checksums, StageLayout, StateLayout

MIB = 1 << 20


def layout(row_bytes=(4096, 2048), fixed_bytes=(0, 0)) -> StateLayout:
    stages = (
        StageLayout(index, index + 1, rows, fixed, bytes([index]) * 16)
        for index, (rows, fixed) in enumerate(zip(row_bytes, fixed_bytes, strict=True))
    )
    return StateLayout(tuple(stages), "planned")


def park(store: ConversationStore, seed: int, tokens: int) -> int:
    """Tokens parked."""
    units = np.full(tokens, seed, np.uint64)
    hashes = tuple(bytes([seed]) * 8 + block.to_bytes(8, "big") for block in range(tokens // 256))
    fixed = store.layout.fixed_bytes > 0
    request = CaptureRequest(
        b"k" * 16, units, hashes, (), store.layout.digest, (tokens,) if fixed else (), rewindable=not fixed
    )
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
    sizes = Sizes(layout(fixed_bytes=fixed), budget)
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
    text = "\n".join(lines("m", Sizes(layout(), 8 * MIB, slots=2), 32_768, 512 * MIB))
    assert "in part   longer than" in text
    assert "conversation 3 while the other 2" in text
    assert "less than 512 MiB of memory free" in text
    assert "parking is off" in "\n".join(lines("m", Sizes(layout(), 0), 4096, 0))
    assert "refused   everything: one block" in "\n".join(lines("m", Sizes(layout(), MIB), 4096, 0))


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


@pytest.mark.parametrize("words", [["--engine", "llama.cpp"], [], ["--gpu-layers", "3"]])
def test_the_command_does_not_tell_torchs_sizes_for_llama_cpp(tmp_path, capsys, monkeypatch, words):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("parkd.cli.model.importlib.util.find_spec", lambda _name: object())
    assert cli.main(["plan", "--model", str(tmp_path / "m.gguf"), *words]) == 2
    told = capsys.readouterr()
    assert "this would run on llama.cpp" in told.err
    assert "bytes a token" not in told.out
    assert (
        cli.main(["replay", "generate:round-robin?agents=2&turns=2", "--model", str(tmp_path / "m.gguf"), *words]) == 2
    )
    told = capsys.readouterr()
    assert "this would run on llama.cpp" in told.err
    assert "--bytes-per-token" in told.err
    assert told.out == ""
