"""The quick reader of GGUF headers gives what the `gguf` package's own gives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from parkd_engine.loading.gguf_reading import QuickReader, quick_library_reader
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint, read_field

from parkd.errors import ModelError

WORDS = ["", "a", "\u2581word", "日本", "x" * 300] * 400


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_block_count(2)
    writer.add_name("a model")
    writer.add_token_list(WORDS)
    writer.add_token_scores([float(number) / 3 for number in range(len(WORDS))])
    writer.add_token_types([number % 6 for number in range(len(WORDS))])
    writer.add_array("gemma3.flags", [True, False, True])
    writer.add_array("gemma3.wide", [2**20, -(2**20)])
    writer.add_float32("gemma3.rope.freq_base", 10000.0)
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_those_of_the_package_s_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    quick, slow = QuickReader(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(slow.fields)
    for name, field in slow.fields.items():
        found = quick.fields[name]
        assert (found.offset, found.types, found.data) == (field.offset, field.types, field.data), name
        assert [part.tobytes() for part in found.parts] == [part.tobytes() for part in field.parts], name
        assert found.contents() == field.contents(), name
        assert read_field(quick, name) == read_field(slow, name), name
    [tensor], [expected] = quick.tensors, slow.tensors
    assert (tensor.name, tensor.data_offset) == (expected.name, expected.data_offset)
    assert np.array_equal(tensor.data, expected.data)


def test_the_library_looks_at_the_file_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looks, reader = write(tmp_path / "m.gguf"), [], gguf.GGUFReader
    look = reader._get
    monkeypatch.setattr(reader, "_get", lambda self, *given, **named: looks.append(1) or look(self, *given, **named))
    with quick_library_reader():
        quick = load_gguf_checkpoint(str(path))
    assert len(looks) < len(WORDS) / 10
    assert gguf.GGUFReader is reader
    assert load_gguf_checkpoint(str(path)) == quick
    assert len(looks) > len(WORDS)


@pytest.mark.parametrize("length", [2**63, 10_000_000])
def test_a_text_that_passes_the_end_is_damage(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    at = path.read_bytes().index("\u2581word".encode()) - 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(length.to_bytes(8, "little"))
    with pytest.raises(ModelError, match="passes the end"):
        QuickReader(path)


def test_another_thread_sees_the_package_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looks, reader = write(tmp_path / "m.gguf"), [], gguf.GGUFReader
    look, names = reader._get, gguf.get_tensor_name_map
    monkeypatch.setattr(reader, "_get", lambda self, *given, **named: looks.append(1) or look(self, *given, **named))
    with ThreadPoolExecutor(1) as other, quick_library_reader():
        made = other.submit(gguf.GGUFReader, path).result()
        assert len(looks) > len(WORDS)
        kind = gguf.MODEL_ARCH.GEMMA3
        assert gguf.get_tensor_name_map(kind, 2) is gguf.get_tensor_name_map(kind, 2)
        first, second = (other.submit(gguf.get_tensor_name_map, kind, 2).result() for _ in range(2))
        assert first is not second
    assert isinstance(made, reader)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, names)


def test_loads_that_overlap_put_back_the_package_s_own(tmp_path: Path) -> None:
    path, reader, inside, both = write(tmp_path / "m.gguf"), gguf.GGUFReader, threading.Event(), threading.Event()

    def load() -> None:
        with quick_library_reader():
            inside.set()
            both.wait(0.05)
            load_gguf_checkpoint(str(path))

    with ThreadPoolExecutor(2) as loads:
        first = loads.submit(load)
        inside.wait(5)
        second = loads.submit(load)
        first.result()
        both.set()
        second.result()
    assert gguf.GGUFReader is reader
