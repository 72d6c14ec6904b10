"""Tests at start that a llama-server has the flags that parkd needs, and measures its slots.

A few tokens are read in slot 0, and its state is saved and looked for in parkd's `--slot-save-path`. This detects a
server that cannot save or writes elsewhere before the first request, and gives the sizes of slot files.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from parkd.engine_adapter.llama_server.client import UpstreamClient, UpstreamRefused
from parkd.engine_adapter.llama_server.slot_file import Ids, file_tokens
from parkd.engine_adapter.llama_server.stream import Ended
from parkd.errors import ModelError

PROBE_TOKENS = (8, 40)
"""Lengths of the two states that are saved. Their sizes give the bytes per token and the constant bytes."""
INSIDE_TOKENS = 96
"""Length of the state inside which a restored file is resumed, if the model may need checkpoints for that. More than
the 64 tokens below which some builds took none."""
FILE_PREFIX = "parkd-"
FILE_SUFFIX = ".slot"
"""Prefix and suffix of parkd's temporary files in the slot directory. Those that a killed process left are removed at
start."""
_NAME_BYTES = 8
_FILE_NAME = re.compile(rf"{FILE_PREFIX}[0-9a-f]{{{2 * _NAME_BYTES}}}{re.escape(FILE_SUFFIX)}")
_TEXT = "One two three four five six seven eight nine ten eleven twelve. " * 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """Measured properties of this server's slots."""

    row_bytes: int
    """Bytes of a slot file per token."""
    base_bytes: int
    """Constant bytes of a slot file."""
    is_linear: bool
    """Every token leaves equally many bytes, so that the size of a file follows from its tokens."""
    resumes_inside: bool
    """The server could go on inside a state that it had read from a file: it cuts the state, or the file has
    checkpoints."""


def probe_slots(client: UpstreamClient, slot_dir: Path, slots: int, *, has_fixed_state: bool | None) -> SlotFacts:
    """Measures the slots; overwrites slots 0 and 1. parkd must be the server's only client. `has_fixed_state`: a part
    of the model's state is true at one position only; None: not known. Raises ModelError, UpstreamFailed."""
    ids = client.tokenize(_TEXT)
    if len(ids) < INSIDE_TOKENS:
        raise ModelError(
            "The llama-server's tokenizer gives too few tokens for parkd's test text. Serve another model."
        )
    sizes = []
    for length in PROBE_TOKENS:
        read_prompt(client, 0, ids[:length], reuse=False)
        sizes.append(_saved(client, slot_dir, ids[:length]))
    _check_idle_slots(client, ids[: PROBE_TOKENS[1]], slots)
    row_bytes = -(-(sizes[1] - sizes[0]) // (PROBE_TOKENS[1] - PROBE_TOKENS[0]))
    base_bytes = max(0, sizes[1] - row_bytes * PROBE_TOKENS[1])
    is_linear = has_fixed_state is False
    return SlotFacts(row_bytes, base_bytes, is_linear, is_linear or _resumes_inside(client, slot_dir, ids))


def _resumes_inside(client: UpstreamClient, slot_dir: Path, ids: Sequence[int]) -> bool:
    """Whether a prompt that differs near the end of a restored file reuses any of it. A server that puts no checkpoints
    into its files has only the end of a recurrent state."""
    path = slot_dir / new_file_name()
    try:
        read_prompt(client, 0, ids[:INSIDE_TOKENS], reuse=False)
        client.save(0, path.name)
        read_prompt(client, 0, ids[: PROBE_TOKENS[0]], reuse=False)  # what is live now is of no use
        client.restore(0, path.name)
        return read_prompt(client, 0, [*ids[: INSIDE_TOKENS - 1], ids[0], ids[1]], reuse=True) > 0
    except UpstreamRefused:
        return False
    finally:
        path.unlink(missing_ok=True)


def read_prompt(client: UpstreamClient, slot: int, ids: Sequence[int], *, reuse: bool) -> int:
    """Reads a prompt into a slot. Returns the number of its tokens that were reused. Raises UpstreamFailed."""
    body = {**base_body(slot, ids, reuse=reuse), "n_predict": 0}
    stream = client.complete(body)
    try:
        while (event := stream.next()) is not None:
            if isinstance(event, Ended):
                return event.cached or 0
    finally:
        stream.close()
    return 0


def base_body(slot: int, ids: Sequence[int] | Ids, *, reuse: bool) -> dict[str, Any]:
    """The fields that all completions have in common."""
    return {
        "prompt": np.asarray(ids, dtype=np.int64),
        "id_slot": slot,
        "cache_prompt": reuse,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        # Without this list, the last event would contain the whole prompt and all settings.
        "response_fields": ["content", "tokens", "stop", "stop_type", "timings", "tokens_predicted"],
    }


def named(what: str, flag: str, call: Callable[[], T]) -> T:
    """The result of `call`. If the server refuses it, raises ModelError, which names the flag to start it with."""
    try:
        return call()
    except UpstreamRefused as refused:
        raise ModelError(f"The llama-server does not {what}: {refused.text} Start it with {flag}.") from refused


def new_file_name() -> str:
    return f"{FILE_PREFIX}{secrets.token_hex(_NAME_BYTES)}{FILE_SUFFIX}"


def remove_leftovers(slot_dir: Path) -> None:
    """Removes temporary files that a killed process left. Raises ModelError."""
    try:
        for path in slot_dir.iterdir():
            if _FILE_NAME.fullmatch(path.name):  # a slot that the user saved may begin and end alike
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"--slot-save-path {slot_dir} cannot be used: {error.strerror}.") from error


def check_one_file_system(slot_dir: Path, park_dir: Path) -> None:
    """Slot files are renamed and linked, never copied. Raises ModelError if that is impossible between these
    directories."""
    name = new_file_name()
    there, here = slot_dir / name, park_dir / name
    try:
        there.touch()
        there.rename(here)
        os.link(here, there)
    except OSError as error:
        raise ModelError(
            f"Files cannot be handed from --slot-save-path {slot_dir} to --park-dir {park_dir} and back "
            f"({error.strerror}): both must lie on one file system that has hard links."
        ) from error
    finally:
        there.unlink(missing_ok=True)
        here.unlink(missing_ok=True)


def _saved(client: UpstreamClient, slot_dir: Path, ids: Sequence[int]) -> int:
    """Saves slot 0, which has read `ids`, and checks the file. Returns its size in bytes. Raises ModelError."""
    name = new_file_name()
    path = slot_dir / name
    try:
        answer = named("save its slots", f"--slot-save-path {slot_dir}", lambda: client.save(0, name))
        if not path.is_file():
            raise ModelError(
                f"The llama-server saved a slot, but not in {slot_dir}: give both the same --slot-save-path, and run "
                f"both on one machine."
            )
        size = path.stat().st_size
        if answer.tokens != len(ids) or answer.bytes != size:
            raise ModelError(
                f"The llama-server saved {answer.tokens} tokens where it had read {len(ids)}: something else uses its "
                f"slots. parkd must be its only client."
            )
        found = file_tokens(path)
        if found is None:
            raise ModelError(
                "The llama-server's slot files have a format that parkd does not support. Use another build of it."
            )
        if found.tolist() != list(ids):
            raise ModelError("The llama-server saved other tokens than it had read: parkd must be its only client.")
        return size
    except OSError as error:
        raise ModelError(f"--slot-save-path {slot_dir} cannot be read: {error.strerror}.") from error
    finally:
        path.unlink(missing_ok=True)


def _check_idle_slots(client: UpstreamClient, ids: Sequence[int], slots: int) -> None:
    """Raises ModelError if a request to one slot clears another: a server with a prompt cache may do that."""
    if slots < 2:
        return
    read_prompt(client, 1, ids[:2], reuse=False)
    if client.slots()[0].tokens == 0 or read_prompt(client, 0, ids, reuse=True) == 0:
        raise ModelError(
            "The llama-server clears its slots while they are idle, so conversations in them would be lost: start it "
            "with --cache-ram 0."
        )
