"""Control vectors: what is added where, what files are taken, and what the digest tells apart."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from parkd_engine.forward.decode_graph import DecodeGraph
from parkd_engine.forward.dense import DenseStage
from safetensors.torch import save_file

from parkd.errors import InvalidRequest, ModelError
from parkd.state import VectorFile
from parkd.words.steering import Steering, SteeringBank, load_vector, load_vectors
from tests.unit.engine.kit.core_models import (
    FAMILIES,
    LAYERS,
    assert_same,
    oracle_logits,
    read_and_decode,
    tiny_model,
    tiny_session,
    token_ids,
)
from tests.unit.engine.kit.hybrid_models import hybrid_model

HIDDEN = 48
IDS = token_ids(150)


def directions(seed: int, layers: tuple[int, ...] = (1, 2, 3)) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(HIDDEN, generator=generator) for layer in layers}


def write_gguf(path: Path, tensors: Mapping[int, torch.Tensor], kind: str = "controlvector") -> Path:
    writer = gguf.GGUFWriter(path, kind)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for layer, tensor in tensors.items():
        writer.add_tensor(f"direction.{layer}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def bank(tmp_path: Path) -> SteeringBank:
    """`calm` steers layers 1 to 3 and is on by default, `terse` only layer 2 and is not."""
    calm = write_gguf(tmp_path / "calm.gguf", directions(1))
    terse = write_gguf(tmp_path / "terse.gguf", directions(2, (2,)))
    return load_vectors([VectorFile("calm", calm, 0.5), VectorFile("terse", terse, 0.0)], HIDDEN, LAYERS)


@contextmanager
def hooked(model: Any, sums: Mapping[int, torch.Tensor]) -> Any:
    """The library's model with directions added to its layers' outputs, by hand."""
    handles = []
    for layer, added in sums.items():

        def add(_module: Any, _inputs: Any, output: torch.Tensor, added: torch.Tensor = added) -> torch.Tensor:
            return output + added

        handles.append(model.model.layers[layer].register_forward_hook(add))
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_a_hand_written_hook(family: str, stages: int, bank: SteeringBank) -> None:
    model = tiny_model(family)
    session = tiny_session(stages, model)
    plain = read_and_decode(session, IDS, decoded=3)
    session.reset()
    session.steer(bank.select({"calm": 0.5, "terse": -2.0}))
    assert session.steering_digest
    steered = read_and_decode(session, IDS, decoded=3)
    expected = {layer: tensor * 0.5 for layer, tensor in directions(1).items()}
    expected[2] = expected[2] + directions(2, (2,))[2] * -2.0
    with hooked(model, expected):
        # The sum of two vectors may be made in either order: one rounding apart.
        for mine, other in zip(steered, oracle_logits(model, IDS, 64, decoded=3), strict=True):
            torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)
    assert (steered[-1] - plain[-1]).abs().max() > 1e-3
    session.reset()
    session.steer(Steering())
    assert not session.steering_digest
    assert_same(read_and_decode(session, IDS, decoded=3), plain)


def test_one_vector_is_bit_equal_to_a_hand_written_hook(bank: SteeringBank) -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.steer(bank.select({"calm": 0.25}))
    mine = read_and_decode(session, IDS, decoded=2)
    with hooked(model, {layer: tensor * 0.25 for layer, tensor in directions(1).items()}):
        assert_same(mine, oracle_logits(model, IDS, 64, decoded=2))


def test_steering_shapes_rows_of_later_layers_only(bank: SteeringBank) -> None:
    """What steers layer 2's output changes the rows of layer 3: that is why it belongs in the key."""
    session = tiny_session(1)
    session.extend(IDS)
    plain = session.arenas[0].rows[: len(IDS)].clone()
    session.reset()
    session.steer(bank.select({"terse": 1.0}))
    session.extend(IDS)
    fields = session.arenas[0].layout.row_fields
    for field in fields:
        columns = slice(field.offset, field.offset + field.nbytes)
        same = torch.equal(session.arenas[0].rows[: len(IDS), columns], plain[:, columns])
        assert same == (field.layer <= 2), field


def test_a_stage_is_steered_by_its_own_layers_alone(bank: SteeringBank) -> None:
    session = tiny_session(2)
    session.steer(bank.select({"terse": 1.0}))
    hooks = [[len(layer._forward_hooks) for layer in stage.inner.layers] for stage in session.stages]
    assert hooks == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_recorded_decoding_is_not_used_while_steered(bank: SteeringBank, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(1)
    used: list[int] = []

    def recorded(tokens: list[int], position: int, _offset: int) -> torch.Tensor:
        assert position == session.position
        used.extend(tokens)
        return torch.zeros((1, 1))

    dense = [DenseStage(*pair, session.config) for pair in zip(session.stages, session.caches, strict=True)]
    monkeypatch.setattr(session.forward, "decode_graph", DecodeGraph({1: ()}, ()))
    monkeypatch.setattr(session.forward, "dense", dense)
    monkeypatch.setattr(session.forward, "step_recorded", recorded)
    session.step(1)
    session.steer(bank.select(None))
    assert session.step(2).shape != (1,)
    session.steer(Steering())
    session.step(3)
    assert used == [1, 3]


def test_the_digest_tells_effective_sets_apart(bank: SteeringBank) -> None:
    digests = [
        bank.digest(scales)
        for scales in ({}, {"calm": 1.0}, {"calm": 0.5}, {"calm": -0.5}, {"terse": 1.0}, {"calm": 1.0, "terse": 1.0})
    ]
    assert digests[0] == b""
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests[1:]} == {16}
    assert bank.digest(None) == bank.digest({"calm": 0.5}) == bank.select(None).digest
    assert bank.digest({"calm": 0.0, "terse": -0.0}) == b""
    assert bank.digest({"terse": 1.0, "calm": 1.0}) == bank.digest({"calm": 1.0, "terse": 1.0})


def test_the_digest_is_of_content_and_layers_not_of_names_and_formats(tmp_path: Path) -> None:
    one = load_vector(write_gguf(tmp_path / "one.gguf", directions(1)), HIDDEN, LAYERS)
    save_file({f"direction.{n}": t for n, t in directions(1).items()}, tmp_path / "same.safetensors")
    same = load_vector(tmp_path / "same.safetensors", HIDDEN, LAYERS)
    narrowed = load_vector(tmp_path / "one.gguf", HIDDEN, LAYERS, (2, 3))
    changed = directions(1)
    changed[3][-1] += 1e-6
    other = load_vector(write_gguf(tmp_path / "other.gguf", changed), HIDDEN, LAYERS)
    assert one.digest == same.digest
    assert len({one.digest, narrowed.digest, other.digest}) == 3
    assert list(narrowed.directions) == [2, 3]
    assert np.array_equal(narrowed.directions[3], directions(1)[3].numpy())


def test_an_unknown_name_is_refused_with_the_known_ones(bank: SteeringBank) -> None:
    for ask in (bank.select, bank.digest):
        with pytest.raises(InvalidRequest, match=r"'happy'.*calm, terse"):
            ask({"happy": 1.0})
    with pytest.raises(InvalidRequest, match="start with --control-vector"):
        SteeringBank().select({"happy": 1.0})
    with pytest.raises(ValueError, match="nan"):
        bank.select({"calm": float("nan")})


def test_half_precision_files_are_read(tmp_path: Path) -> None:
    halves = {1: directions(1)[1].half()}
    save_file({"direction.1": halves[1].bfloat16(), "unrelated": torch.zeros(3)}, tmp_path / "b.safetensors")
    read = load_vector(write_gguf(tmp_path / "h.gguf", halves), HIDDEN, LAYERS)
    assert np.array_equal(read.directions[1], halves[1].float().numpy())
    read = load_vector(tmp_path / "b.safetensors", HIDDEN, LAYERS)
    assert np.array_equal(read.directions[1], halves[1].bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({1: torch.zeros(8)}, "controlvector", "made for another model"),
        ({0: torch.zeros(HIDDEN)}, "controlvector", r"direction\.0.*1 to 3"),
        ({LAYERS: torch.zeros(HIDDEN)}, "controlvector", r"direction\.4.*1 to 3"),
        ({1: torch.full((HIDDEN,), float("inf"))}, "controlvector", "not finite"),
        ({1: torch.zeros(HIDDEN)}, "llama", "says it is llama"),
        ({}, "controlvector", r"no tensor named direction\.N"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tensors: dict[int, torch.Tensor], kind: str, message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "v.gguf", tensors, kind)
    with pytest.raises(ModelError, match=message):
        load_vector(path, HIDDEN, LAYERS)


@pytest.mark.parametrize("name", ["v.gguf", "v.safetensors"])
def test_damage_is_a_load_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(np.random.default_rng(1).bytes(300))
    with pytest.raises(ModelError, match="is damaged"):
        load_vector(tmp_path / name, HIDDEN, LAYERS)


def test_every_residual_stream_is_steered_alike_in_any_stage(bank: SteeringBank) -> None:
    """Of three streams side by side, as if a direction had been added to the one hidden state they stand for."""
    model = hybrid_model("qwen4-exp")
    plain = read_and_decode(tiny_session(1, model), IDS[:60])
    steered = bank.select({"calm": 1.0})
    hooks = [
        model.model.layers[layer].register_forward_hook(lambda _m, _i, out, d=direction: out + torch.cat([d, d, d]))
        for layer, direction in directions(1).items()
    ]
    expected = read_and_decode(tiny_session(1, model), IDS[:60])
    for hook in hooks:
        hook.remove()
    assert not torch.equal(plain[0], expected[0])
    for stages in (1, 3):
        session = tiny_session(stages, model)
        session.steer(steered)
        assert_same(read_and_decode(session, IDS[:60]), expected)
