"""The header of a GGUF file: what a writer of another author wrote is read, damage is told, no tensor is read."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from parkd.errors import ModelError
from parkd.model_files.gguf_metadata import read_metadata

NUMBERS = np.random.default_rng(3).standard_normal((6, 32)).astype(np.float32)


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_name("a näme")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 1 << 31)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("shares", [0.5, 0.25])
    writer.add_array("tags", ["one", "two"])
    writer.add_token_list(["<s>", "é", "▁a"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_tensor("plain", NUMBERS)
    writer.add_tensor("half", NUMBERS.astype(np.float16))
    brain = (NUMBERS.view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("brain", brain.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    packed = gguf.quants.quantize(NUMBERS, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_entry_is_read(tmp_path: Path) -> None:
    file = read_metadata(write(tmp_path / "m.gguf"))
    expected = {
        "general.architecture": "llama",
        "general.name": "a näme",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 1 << 31,
        "i32": -5,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "numbers": [1, 2, 3],
        "shares": [0.5, 0.25],
        "tags": 2,
        "tokenizer.ggml.tokens": ["<s>", "é", "▁a"],
        "tokenizer.ggml.merges": ["a b", "c d"],
    }
    assert dict(file.entries) == expected
    assert file.kind == "llama"
    assert list(file.tensors) == ["plain", "half", "brain", "packed"]


@pytest.mark.parametrize("alignment", [None, 64, 256])
def test_plain_tensors_are_read_where_they_are(alignment: int | None, tmp_path: Path) -> None:
    file = read_metadata(write(tmp_path / "m.gguf", alignment))
    assert np.array_equal(file.tensor("plain"), NUMBERS)
    assert np.array_equal(file.tensor("half"), NUMBERS.astype(np.float16))
    cut = (NUMBERS.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(file.tensor("brain"), cut)
    assert file.tensors["packed"].shape == (6, 32)
    with pytest.raises(ModelError, match="packed is quantised"):
        file.tensor("packed")


def test_a_file_cut_anywhere_in_its_header_is_damaged(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    places = read_metadata(tmp_path / "m.gguf").tensors
    header = min(place.offset for place in places.values())
    short = tmp_path / "short.gguf"
    for size in range(1, header - 32, 7):
        short.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"short\.gguf is damaged"):
            read_metadata(short)
    short.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged"):
        read_metadata(short)
    with pytest.raises(ModelError, match="damaged"):
        read_metadata(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGML" + struct.pack("<IQQ", 3, 0, 0), "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "ends inside a text"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 60),
            "damaged",
        ),
    ],
)
def test_what_is_not_known_is_told(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_metadata(tmp_path / "m.gguf")
