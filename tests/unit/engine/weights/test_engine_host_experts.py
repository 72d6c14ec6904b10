"""Experts that stay in main memory: the bits of a model that has all of them in place, each expert read once, faults
that end one request alone, and one account of main memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session, restore
from parkd_engine.account import ModelMemory
from parkd_engine.balance import HOST_CONTEXT, choose_host_layers, choose_split
from parkd_engine.families.multimodal import language_config, language_model
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import layer_placement
from parkd_engine.memory import usable_bytes
from parkd_engine.weights import host_experts
from parkd_engine.weights.host_experts import (
    FetchRoom,
    HostExperts,
    Way,
    choose_way,
    expert_bytes,
    experts_module,
    room_bytes,
)

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.loading import load_parts
from parkd.errors import ModelError, StageFailed
from tests.unit.engine.kit.core_models import CONTEXT, assert_same, read_and_decode, threads_for, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model
from tests.unit.engine.kit.parking import parked, resumed_at

EXPERTS = 4
"""Of every layer that has experts in the models here."""
CHOSEN = 2
WITH_EXPERTS = {
    "qwen3-moe": (0, 1, 2, 3),
    "qwen3.5-moe": (0, 1, 2, 3),
    "glm4-moe": (1, 2, 3),
    "minimax-m2": (0, 1, 2, 3),
    "gpt-oss": (0, 1, 2, 3),
    "gemma4": (0, 1, 2, 3),
    "nemotron-h": (1,),
    "deepseek-v3": (1, 2, 3),
    "qwen4-exp": (0, 1, 2, 3),
}
"""Family -> the layers that have routed experts."""
EVERY_FAMILY = pytest.mark.parametrize("family", list(WITH_EXPERTS))
NEVER = 1 << 20
CARD = ("cuda:0",)


def opened(model: Any, hosted: Sequence[int] = (), stages: int = 2, kv_format: str | None = None) -> Session:
    layout = EngineConfig(devices=("cpu",) * stages, context_tokens=CONTEXT, batch_tokens=64, kv_format=kv_format)
    return open_session(model, layout, host_layers=hosted)


def hosted_in(session: Session) -> list[HostExperts]:
    return [each for stage in session.stages for each in stage.host_experts]


def in_pieces(each: HostExperts, experts_at_once: int) -> None:
    """Fetches in groups of so many experts."""
    each._at_once = experts_at_once


@pytest.mark.parametrize(("stages", "kv_format"), [(1, None), (2, "int8"), (3, None)])
@EVERY_FAMILY
def test_logits_are_those_of_experts_in_place(family: str, stages: int, kv_format: str | None) -> None:
    """Fetched whole, fetched one or three at a time, computed in main memory: the same bits. In gpt-oss, whose gate is
    several functions of strided numbers, torch rounds the last numbers of a tensor otherwise, so there pieces differ
    in the last place."""
    ids = token_ids(140)
    with threads_for(kv_format):
        expected = read_and_decode(opened(hybrid_model(family), (), stages, kv_format), ids, decoded=5)
        for at_once, fetched_from in ((EXPERTS, 1), (1, 1), (3, 1), (EXPERTS, 2), (EXPERTS, NEVER)):
            session = opened(hybrid_model(family), WITH_EXPERTS[family][-2:], stages, kv_format)
            assert len(hosted_in(session)) == len(WITH_EXPERTS[family][-2:])
            for each in hosted_in(session):
                in_pieces(each, at_once)
                each.way = Way(fetched_from)
            mine = read_and_decode(session, ids, decoded=5)
            if family == "gpt-oss" and at_once < EXPERTS:
                for one, other in zip(mine, expected, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-5 if kv_format is None else 2e-2, rtol=0)
            else:
                assert_same(mine, expected)
            fetched = [each.fetched for each in hosted_in(session)]
            assert all(fetched) == (fetched_from < NEVER)


@EVERY_FAMILY
def test_half_precision_has_the_librarys_bits(family: str) -> None:
    """Routing weights may be wider than what they weigh: then sums are, too."""
    draw = torch.Generator().manual_seed(3)
    decoder = language_model(hybrid_model(family, dtype=torch.bfloat16))
    decoder.config._experts_implementation = "grouped_mm"
    module = experts_module(decoder.layers[WITH_EXPERTS[family][0]], EXPERTS)
    assert module is not None
    hidden = torch.randn((9, decoder.config.hidden_size), generator=draw).bfloat16()
    index = torch.rand((9, EXPERTS), generator=draw).topk(CHOSEN).indices
    for weights in (torch.rand((9, CHOSEN), generator=draw), torch.rand((9, CHOSEN), generator=draw).bfloat16()):
        with torch.inference_mode():
            expected = module(hidden, index, weights)
            mine = HostExperts(module, FetchRoom(hidden.device, room_bytes(expert_bytes(module), EXPERTS)))
            in_pieces(mine, 3)
            assert torch.equal(mine(hidden, index, weights), expected)
            assert mine(hidden, index, weights).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5-moe", "gpt-oss", "deepseek-v3"])
def test_a_parked_conversation_goes_on_bit_equal(family: str) -> None:
    session = opened(hybrid_model(family), WITH_EXPERTS[family])
    for each in hosted_in(session):
        in_pieces(each, 2)
        each.way = Way(2)  # Chunks fetch, steps do not.
    ids, places = token_ids(121), (40, 120)
    for place in places:
        session.extend(ids[session.position : place], checkpoint_at=(place,))
    expected = [session.step(int(ids[120])) for _ in range(3)]
    session.truncate(120)
    plan = parked(session, places, 120)
    session.reset()
    session.extend(token_ids(100, seed=9))
    session.reset()
    restore(session, resumed_at(plan, 120))
    assert_same([session.step(int(ids[120])) for _ in range(3)], expected)


def test_no_expert_is_read_twice_in_a_forward_pass() -> None:
    """Each layer copies exactly the experts that its tokens chose, each once, by the router's own answer."""
    family = "qwen3-moe"
    copies: list[tuple[int, str, int]] = []
    chosen: dict[int, set[int]] = {}
    session = opened(hybrid_model(family), WITH_EXPERTS[family], stages=1)
    for layer, each in enumerate(hosted_in(session)):
        in_pieces(each, 3)
        each._copy = _noting(copies, layer, each)
        router = session.stages[0].layers[layer].mlp.gate
        router.register_forward_hook(
            lambda _module, _inputs, output, layer=layer: chosen.update({layer: set(output[2].flatten().tolist())})
        )
    for read in (lambda: session.extend(token_ids(5)), lambda: session.step(7), lambda: session.extend(token_ids(58))):
        copies.clear()
        read()
        assert len(copies) == len(set(copies)), "an expert was read twice"
        found = {layer: {expert for at, _, expert in copies if at == layer} for layer in chosen}
        assert found == chosen
        assert {name for _, name, _ in copies} == {"gate_up_proj", "down_proj"}


def _noting(copies: list[tuple[int, str, int]], layer: int, each: HostExperts) -> Callable[..., None]:
    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        name = next(name for name, tensor in each._tensors.items() if tensor.shape[1:] == source.shape[1:])
        first = (source.data_ptr() - each._tensors[name].data_ptr()) // source[0].nbytes
        copies.extend((layer, name, first + offset) for offset in range(len(source)))
        into.copy_(source)

    return copy


class WatchedRoom(FetchRoom):
    """Notes copies into a half and products from it, whose order a card keeps only if it is told."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        super().__init__(device, size_bytes)
        self.noted: list[tuple[str, int]] = []

    def before_copy(self, half: int) -> None:
        self.noted.append(("copy", half))

    def after_products(self, half: int) -> None:
        self.noted.append(("products", half))


def test_a_half_is_not_copied_into_before_what_reads_it_is_noted() -> None:
    """Also while the checksums are made. Seen on a card: the sums of experts that were overwritten meanwhile."""
    decoder = language_model(hybrid_model("qwen3-moe"))
    module = experts_module(decoder.layers[0], EXPERTS)
    assert module is not None
    room = WatchedRoom(torch.device("cpu"), 2 * expert_bytes(module))
    each = HostExperts(module, room)
    assert [half for what, half in room.noted if what == "copy"] == [0, 1, 0, 1], "one expert at a time, in turns"
    hidden = torch.randn((9, decoder.config.hidden_size))
    index = torch.arange(18).view(9, 2) % EXPERTS
    with torch.inference_mode():
        each(hidden, index, torch.ones((9, 2)))
    for half in (0, 1):
        mine = [what for what, of in room.noted if of == half]
        assert mine == ["copy", "products"] * (len(mine) // 2)


class Fault:
    """Makes the copies of one layer go wrong in one way, while it is on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on, self.now_s = kind, False, 0.0

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)
        if not self.on:
            return
        if self.kind == "poisoned":
            into.view(-1).view(torch.uint8)[5] ^= 1
        elif self.kind == "swapped":
            into.view(-1)[:2] = source.view(-1)[:2].flip(0)
        elif self.kind == "slow":
            self.now_s += 60.0
        else:
            raise OSError("the bus is gone")


@pytest.mark.parametrize("doing", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["poisoned", "swapped", "slow", "broken"])
def test_a_faulty_fetch_is_an_error_of_that_request_alone(kind: str, doing: str) -> None:
    """In the second stage, so that the first has advanced. The next request reads on, with the bits of one without a
    fault."""
    family, fault = "qwen3-moe", Fault(kind)
    ids = token_ids(40)
    untouched = opened(hybrid_model(family), (3,))
    untouched.extend(ids[:30])
    expected = [untouched.step(int(ids[30])), untouched.step(int(ids[31]))]
    session = opened(hybrid_model(family), (3,))
    [each] = hosted_in(session)
    each._copy, each._clock = fault.copy, lambda: fault.now_s
    if doing == "decode":
        session.extend(ids[:30])
    fault.on = True
    with pytest.raises(StageFailed) as failed:
        session.step(int(ids[30])) if doing == "decode" else session.extend(ids[:30])
    assert failed.value.stage == 1
    assert session.position == (30 if doing == "decode" else 0)
    fault.on = False
    session.extend(ids[session.position : 30])
    assert_same([session.step(int(ids[30])), session.step(int(ids[31]))], expected)


def test_the_faster_way_is_taken_and_fetching_from_where_it_wins() -> None:
    model = hybrid_model("qwen3-moe")
    session = opened(model, (3,), stages=1)
    [each] = hosted_in(session)
    hidden, dtype = model.config.hidden_size, torch.float32
    tokens_seen: list[int] = []

    def timed(way: Any, _device: Any, states: torch.Tensor, *_: Any) -> float:
        tokens_seen.append(len(states))
        return 1e-3 * len(states) if way == each.computed_there else 10e-3

    original, host_experts._timed = host_experts._timed, timed
    try:
        way = choose_way(each, CHOSEN, torch.device("cpu"), dtype, hidden)
    finally:
        host_experts._timed = original
    assert way.fetched_from_tokens == 16, "the first of those tried with which 10 ms are less than 1 ms a token"
    assert way.seconds == {1: (1e-3, 10e-3), 4: (4e-3, 10e-3), 16: (16e-3, 10e-3)}
    assert max(tokens_seen) == 16, "longer ones are not tried, which could take seconds"
    real = choose_way(each, CHOSEN, torch.device("cpu"), dtype, hidden)
    assert real.seconds is not None
    assert all(there > 0 and here > 0 for there, here in real.seconds.values())


@EVERY_FAMILY
def test_the_account_moves_the_experts_from_the_device_to_main_memory(family: str) -> None:
    model = hybrid_model(family)
    layout = EngineConfig(devices=CARD, context_tokens=CONTEXT)
    whole = ModelMemory(model.config, torch.float32, layout)
    assert whole.expert_layers == WITH_EXPERTS[family]
    hosted = WITH_EXPERTS[family][-2:]
    parts = [experts_module(language_model(model).layers[layer], EXPERTS) for layer in hosted]
    sizes = [sum(each.nbytes for each in part.parameters()) for part in parts if part is not None]
    account = whole.with_host_layers(hosted)
    assert account.host_bytes == sum(sizes)
    assert whole.host_bytes == 0
    ranges = [(0, int(language_config(model.config).num_hidden_layers))]
    [before], [after] = whole.stages(ranges), account.stages(ranges)
    assert before.lines(0)["weights"] - after.lines(0)["weights"] == sum(sizes)
    session = opened(model, hosted, stages=1)
    [room] = {id(each._room): each._room for each in hosted_in(session)}.values()
    assert after.lines(0)["fetched experts"] == room._halves.nbytes
    assert "fetched experts" not in before.lines(0)
    assert "fetched experts" not in after.beside_weights().lines(0)


def test_a_room_is_bounded_and_has_two_halves() -> None:
    mib = 1 << 20
    assert room_bytes(9 * mib, 128) == 2 * 28 * 9 * mib
    assert room_bytes(mib, 8) == 2 * 8 * mib
    assert room_bytes(900 * mib, 8) == 2 * 900 * mib


def automatically(name: str, free_gib: float, **settings: Any) -> tuple[int, tuple[int, ...], ModelMemory]:
    """(layers with experts, those that stay in main memory, the account) on one card with so much free memory."""
    config = preset_config(name)
    layout = EngineConfig(devices=CARD, cpu_experts=None, **settings)
    memory = ModelMemory(config, torch.bfloat16, layout)
    free = int(free_gib * (1 << 30))
    return (
        len(memory.expert_layers),
        choose_host_layers(config, torch.bfloat16, layout, lambda _: free, memory),
        memory,
    )


@pytest.mark.parametrize("free_gib", [16, 24, 40])
def test_auto_leaves_as_few_layers_as_let_the_rest_fit(free_gib: int) -> None:
    name = "random:qwen3-30b-a3b"
    layers, hosted, memory = automatically(name, free_gib)
    assert hosted == tuple(range(layers - len(hosted), layers))
    assert 0 < len(hosted) < layers
    room = usable_bytes(free_gib << 30, "cuda:0")

    def needed(count: int) -> int:
        [stage] = memory.with_host_layers(range(layers - count, layers)).stages([(0, 48)])
        return stage.total(HOST_CONTEXT)

    assert needed(len(hosted)) <= room < needed(len(hosted) - 1)


def test_auto_leaves_none_where_all_fit_and_all_where_none_do() -> None:
    assert automatically("random:qwen3-30b-a3b", 100)[1] == ()
    layers, hosted, _ = automatically("random:qwen3-30b-a3b", 3)
    assert len(hosted) == layers
    assert automatically("random:qwen3-8b", 100)[1] == ()


def test_what_cannot_be_is_said_before_weights_are_read() -> None:
    def chosen(name: str, devices: tuple[str, ...], count: int | None) -> tuple[int, ...]:
        layout = EngineConfig(devices=devices, cpu_experts=count)
        config = preset_config(name)
        memory = ModelMemory(config, torch.bfloat16, layout)
        return choose_host_layers(config, torch.bfloat16, layout, lambda _: 1 << 40, memory)

    assert chosen("random:tiny-qwen3-moe", CARD, 1) == chosen("random:tiny-qwen3-moe", CARD, 9)[-1:]
    assert chosen("random:tiny-qwen3-moe", ("cpu",), None) == ()
    assert chosen("random:tiny-qwen3-moe", ("cpu",), 0) == ()
    with pytest.raises(ModelError, match="is for cards"):
        chosen("random:tiny-qwen3-moe", ("cpu",), 2)
    with pytest.raises(ModelError, match="is for models with experts"):
        chosen("random:tiny-qwen3", CARD, 2)
    with pytest.raises(ValueError, match="cpu_experts"):
        EngineConfig(cpu_experts=-1)


def test_experts_and_parked_conversations_share_one_account_of_main_memory(tmp_path: Path) -> None:
    """Said before weights are read, with the numbers; `auto` for the budget leaves room of itself."""
    config = preset_config("random:qwen3-30b-a3b")
    layout = EngineConfig(devices=CARD, cpu_experts=40)
    size = ModelMemory(config, torch.bfloat16, layout, host_layers=range(8, 48)).host_bytes
    assert size == 40 * 128 * 3 * 2048 * 768 * 2
    settings = ModelConfig("random:qwen3-30b-a3b", tmp_path, layout=layout)
    main, budget = 64 << 30, 20 << 30
    assert size < usable_bytes(main, "cpu") < size + budget
    with pytest.raises(ModelError, match="experts of 40 layers") as refused:
        load_parts(settings, None, lambda device: main if device == "cpu" else 16 << 30, lambda: budget)
    assert all(f"{each >> 20:,} MiB" in refused.value.message for each in (size, main, budget))
    assert "--conversation-cache-mib" in refused.value.message


def test_a_split_over_cards_weighs_what_stays_on_them() -> None:
    """Without its experts a layer is light, so the card of the last layers gets more of them."""
    config = preset_config("random:qwen3-30b-a3b")
    layout = EngineConfig(devices=("cuda:0", "cuda:1"), context_tokens=4096)
    memory = ModelMemory(config, torch.bfloat16, layout)
    room = 80 << 30
    even = choose_split(config, torch.bfloat16, layout, lambda _: room, memory)
    account = memory.with_host_layers(range(36, 48))
    uneven = choose_split(config, torch.bfloat16, layout, lambda _: room, account)
    assert uneven[1][0] < even[1][0]


def test_random_experts_are_drawn_to_where_they_stay() -> None:
    place = layer_placement([(0, 4)], ["cuda:0"], (2, 3))
    names = {
        "model.layers.2.mlp.experts.gate_up_proj": "cpu",
        "model.layers.1.mlp.experts.gate_up_proj": "cuda",
        "model.layers.2.mlp.shared_experts.up_proj.weight": "cuda",
        "model.layers.3.mlp.gate.weight": "cuda",
        "model.embed_tokens.weight": "cuda",
    }
    assert {name: place(name).type for name in names} == names
