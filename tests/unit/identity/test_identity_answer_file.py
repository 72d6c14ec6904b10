"""Answers outlive the server; what is damaged is not read."""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np
import orjson
import pytest

from parkd.identity.answer_file import AnswerFile
from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said

LIMIT_BYTES = 64 * 1024


def remembered(number: int, ids: int = 10) -> RememberedAnswer:
    said = Said((f"No {number} é",), "thought", (("look", '{"a":1}'),))
    return RememberedAnswer(number.to_bytes(16, "little"), np.arange(ids, dtype=np.int32) + number, said)


def memory() -> OutputMemory:
    return OutputMemory(LIMIT_BYTES, ["<end>"])


def written(path: Path, count: int) -> None:
    file, held = AnswerFile(path, LIMIT_BYTES), memory()
    file.open(held)
    for number in range(count):
        file.append(remembered(number), held)
    file.close()


def read(path: Path) -> list[RememberedAnswer]:
    held = memory()
    file = AnswerFile(path, LIMIT_BYTES)
    file.open(held)
    file.close()
    return held.all()


def same(a: RememberedAnswer, b: RememberedAnswer) -> bool:
    return a.prefix == b.prefix and a.said == b.said and np.array_equal(a.ids, b.ids)


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    written(tmp_path / "answers", 5)
    back = read(tmp_path / "answers")
    assert len(back) == 5
    assert all(same(answer, remembered(number)) for number, answer in enumerate(back))
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_reading_ends_before_the_first_damage_and_writing_goes_on_there(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "answers"
    written(path, 5)
    data = bytearray(path.read_bytes())
    size = (len(data) - 12) // 5
    if damage == "cut":
        data = data[:-3]
    else:
        data[12 + 2 * size + 40] ^= 1
    path.write_bytes(data)
    whole = 4 if damage == "cut" else 2
    assert len(read(path)) == whole
    file, held = AnswerFile(path, LIMIT_BYTES), memory()
    assert file.open(held) == whole
    file.append(remembered(9), held)
    file.close()
    back = read(path)
    assert len(back) == whole + 1
    assert same(back[-1], remembered(9))


@pytest.mark.parametrize("junk", [b"", b"short", b"PARKDANS\x63\x00\x00\x00", b"x" * 5000])
def test_another_file_or_version_is_started_anew(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "answers"
    path.write_bytes(junk)
    written(path, 1)
    assert len(read(path)) == 1


def test_the_file_stays_within_twice_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    file = AnswerFile(path, LIMIT_BYTES)
    held = OutputMemory(LIMIT_BYTES, ["<end>"], on_new=lambda answer: file.append(answer, held))
    file.open(held)
    for number in range(400):
        held.keep(remembered(number, ids=200))
        file.append(remembered(number, ids=200), held)
        assert path.stat().st_size <= 2 * LIMIT_BYTES + 2000
    file.close()
    assert same(read(path)[-1], remembered(399, ids=200))


def test_a_folder_that_cannot_be_written_only_costs_the_file(tmp_path: Path) -> None:
    file, held = AnswerFile(tmp_path / "nowhere" / "answers", LIMIT_BYTES), memory()
    assert file.open(held) == 0
    file.append(remembered(1), held)
    held.keep(remembered(1))
    assert len(held.all()) == 1


def test_found_by_use_15_a_link_in_place_of_the_answers_is_not_followed(tmp_path: Path) -> None:
    """Issue 22, item 15: what a link named `answers` leads to is neither read nor written."""
    written(tmp_path / "elsewhere", 3)
    before = (tmp_path / "elsewhere").read_bytes()
    (tmp_path / "answers").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "answers.part").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "answers") == []
    written(tmp_path / "answers", 1)
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert len(read(tmp_path / "answers")) == 1
    assert not (tmp_path / "answers").is_symlink()


def test_answers_of_version_1_are_read_and_written_anew(tmp_path: Path) -> None:
    """They do not tell their namespace."""
    path, answer = tmp_path / "answers", remembered(7)
    told = orjson.dumps([list(answer.said.runs), answer.said.reasoning, [list(call) for call in answer.said.calls]])
    body = answer.prefix + struct.pack("<I", len(answer.ids)) + answer.ids.astype("<i4").tobytes() + told
    checksum = blake2b(body, digest_size=16, person=b"parkd-answers").digest()
    path.write_bytes(b"PARKDANS" + struct.pack("<I", 1) + struct.pack("<I", len(body)) + checksum + body)
    (back,) = read(path)
    assert same(back, answer)
    assert back.namespace is None
    assert path.read_bytes()[8:12] == struct.pack("<I", 2)
    (again,) = read(path)
    assert same(again, answer)
    assert again.namespace is None
    written(path, 2)
    assert len(read(path)) == 3
