"""The text that parkd prints while it starts and when it is ready, made from plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from parkd.config import MIB
from parkd.engine_adapter.base import EngineInfo
from parkd.errors import ParkdError
from parkd.state import Grain, Resume
from parkd.store.records import DiskStats, StoreConfig
from parkd.store.sizes import Sizes
from parkd.types import TurnRequest

PROGRESS_STEP_S = 2.0
CANARY_FAILED = (
    "parking is off, because this model's state did not come back as it left (parkd canary): a conversation that "
    "leaves is read again when it returns"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """The parking budget, and what it holds of one conversation of this model."""

    budget_bytes: int
    tokens: int
    """The longest single conversation that can be parked whole, in whole blocks."""
    full_context_bytes: int
    """Bytes of a conversation that fills the context."""


def budget_in_tokens(config: StoreConfig, info: EngineInfo) -> Budget:
    """What the budget holds by the store's own rules. Slightly less than its bytes, since memory is allocated in
    slabs."""
    sizes = Sizes(info.layout, config)
    return Budget(config.budget_bytes, sizes.longest(), sizes.need_bytes(info.context_tokens))


def parking_line(budget: Budget, info: EngineInfo) -> str:
    if not info.holds_state:
        return "none: the server keeps its own state; what it says it reused is reported, and nothing is parked"
    if budget.budget_bytes == 0:
        return "parking is off (--conversation-cache-mib 0): a conversation that leaves is read again when it returns"
    if info.layout.grain is Grain.FILE:
        return "conversations are parked in the server's own slot files; memory holds only their metadata"
    full = f"a full {info.context_tokens:,}-token context needs {-(-budget.full_context_bytes // MIB):,} MiB"
    held = f"parking holds {budget.tokens:,} tokens in {budget.budget_bytes // MIB:,} MiB"
    if budget.tokens < info.context_tokens:
        return f"{held}; {full} and would not be parked whole"
    return f"{held}; {full}"


def disk_line(disk: DiskStats, directory: Path | None, free_bytes: int | None) -> str:
    """`free_bytes` is what the directory's file system has left."""
    size = f"disk      {disk.budget_bytes // MIB:,} MiB"
    if directory is None:
        return f"{size} in unnamed files, which end with this process"
    other = (
        f", {disk.foreign_conversations:,} of another model, KV type or layout" if disk.foreign_conversations else ""
    )
    found = f"{size} in {directory}; {disk.conversations - disk.foreign_conversations:,} conversations found{other}"
    if free_bytes is not None and disk.bytes_in_use + free_bytes < disk.budget_bytes:
        return f"{found}; only {free_bytes // MIB:,} MiB are free there, and what no longer fits is not written"
    return found


def memory_line(device: str, first_layer: int, end_layer: int, account: Mapping[str, int]) -> str:
    """What the layers `[first_layer, end_layer)` take on their device. `account` is name -> bytes."""
    parts = ", ".join(f"{name} {-(-size // MIB):,}" for name, size in account.items())
    return f"memory    {device} layers {first_layer}-{end_layer - 1}: {sum(account.values()) // MIB:,} MiB ({parts})"


def template_warning(render: Callable[[TurnRequest], str], *, calls_tools: bool) -> str | None:
    """A warning about what the model's chat template lacks; None if it lacks nothing. `render` renders a prompt."""
    said = "Does it show this?"
    try:
        shown = said in render(TurnRequest(messages=[{"role": "user", "content": said}]))
    except ParkdError:
        shown = False
    if not shown:
        return "no chat template shows what users say: name one with --chat-template-file, or use /v1/completions only"
    if not calls_tools:
        return "this model's chat template has no known format for tool calls: agents get text, never a tool call"
    return None


def seats_lines(info: EngineInfo) -> list[str]:
    """How many conversations stay live, if it is more than one."""
    if info.live_conversations == 1 or info.layout.grain is Grain.FILE:
        return []
    room = f"{info.row_tokens:,} tokens together" if info.row_tokens else f"{info.context_tokens:,} tokens each"
    return [f"seats     {info.live_conversations} live conversations, with {room}"]


def host_line(layers: Sequence[int], size: int, budget_bytes: int) -> str:
    """What experts and parked conversations take of main memory together."""
    return (
        f"main mem  {(size + budget_bytes) // MIB:,} MiB (experts of {len(layers)} layers {-(-size // MIB):,}, parked "
        f"conversations {budget_bytes // MIB:,})"
    )


def host_lines(info: EngineInfo, budget_bytes: int) -> list[str]:
    """The same, and how fast the experts are either way; nothing if all are where they are computed."""
    hosted = info.host_experts
    if hosted is None:
        return []
    measured = "; ".join(
        f"{tokens} token{'' if tokens == 1 else 's'} {there * 1e3:.2f} ms a layer there, {here * 1e3:.2f} fetched"
        for tokens, (there, here) in hosted.seconds.items()
    )
    return [
        host_line(hosted.layers, hosted.bytes, budget_bytes),
        f"experts   fetched to the card from {hosted.fetched_from_tokens} tokens on ({measured})",
    ]


def describe(
    info: EngineInfo, budget: Budget, url: str, *, needs_key: bool, warning: str | None, failures: Sequence[str] = ()
) -> list[str]:
    """Lines for the terminal, top to bottom. `failures` is what a canary found wrong."""
    stages = [
        f"{device} layers {stage.first_layer}-{stage.end_layer - 1}"
        for device, stage in zip(info.devices, info.layout.stages, strict=True)
    ]
    fixed = f", {info.layout.fixed_bytes:,} bytes fixed" if info.layout.fixed_bytes else ""
    if info.layout.grain is Grain.FILE:
        stages = ["of the server's own"]
        fixed = ", resumed at its end only" if info.layout.resume is Resume.AT_END else ""
    context = (
        f"{info.context_tokens:,} tokens, {info.layout.row_bytes:,} bytes a token{fixed}, "
        f"live state {info.arena_bytes // MIB:,} MiB"
    )
    if not info.holds_state:
        stages = ["of the server's own"]
        context = f"{info.context_tokens:,} tokens" if info.context_tokens else "as long as the server takes"
    lines = [
        f"model     {info.model_name} ({info.architecture}), weights {info.weights_bytes // MIB:,} MiB",
        f"stages    {' | '.join(stages)}",
        f"context   {context}",
        *seats_lines(info),
        *(
            memory_line(device, stage.first_layer, stage.end_layer, account)
            for device, stage, account in zip(info.devices, info.layout.stages, info.memory, strict=False)
        ),
        *host_lines(info, budget.budget_bytes),
        f"budget    {CANARY_FAILED if failures else parking_line(budget, info)}",
        *(f"warning   {failure}" for failure in failures),
    ]
    if info.is_demo_model:
        lines.append("warning   this is the demo model, too small for real work: name your own with --model")
    if warning is not None:
        lines.append(f"warning   {warning}")
    header = " -H 'authorization: Bearer YOUR_KEY'" if needs_key else ""
    body = '{"messages":[{"role":"user","content":"Hello"}],"stream":true}'
    lines += [
        f"serving   {url}/v1 (OpenAI; any model name is accepted), Anthropic at {url}",
        f"try       curl -N {url}/v1/chat/completions{header} -H 'content-type: application/json' -d '{body}'",
    ]
    return lines


class ProgressPrinter:
    """Shows the progress of a long step: in place on a terminal, else as a line every few seconds. Shows nothing for
    short steps."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._in_place = output.isatty()
        self._what = ""
        self._began_s = self._shown_s = time.monotonic()
        self._shown = False

    def __call__(self, what: str, share: float) -> None:
        """`share` is the fraction done, from 0 to 1."""
        now_s = time.monotonic()
        if what != self._what:
            self._what, self._began_s, self._shown_s, self._shown = what, now_s, now_s, False
        done = share >= 1.0
        if now_s - self._shown_s < (0.1 if self._in_place else PROGRESS_STEP_S) and not (done and self._shown):
            return
        self._shown_s, self._shown = now_s, True
        line = f"{what}: {share:4.0%} ({now_s - self._began_s:.0f} s)"
        end = "\n" if done or not self._in_place else ""
        self._output.write(f"\r{line}{end}" if self._in_place else f"{line}\n")
        self._output.flush()
