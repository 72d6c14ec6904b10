"""One account of the memory that a stage takes on its device. Whoever needs a size reads it: the split, the choice of
the context, the loader, `parkd plan` and the lines at start.

    weights      layers with their experts, the ends of the model, draft head, vision tower      from the configuration
    state        rows, fixed state, its copies, windows, index; all but rows for each seat       allocated at start
    graphs       recorded forward passes, and the memory of their intermediate results           recorded at start
    workspace    what reading a chunk takes for a while (`workspace`)                            taken and given back
    library      what the matrix library keeps for each stream                                   measured at start
    fetching     room for experts that come from main memory                                     allocated at start

Nothing here needs weights or a device. Main memory beside a card is not part of a stage: page-locked memory for copies,
and the experts of layers that `--cpu-experts` leaves there (`ModelMemory.host_bytes`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parkd.errors import ModelError
from parkd.state import EngineConfig
from parkd.state.engine_config import AUTO_SEATS
from parkd_engine.arenas.arena import WindowRoom
from parkd_engine.arenas.kv_format import kv_dtype_of
from parkd_engine.arenas.layout import StageStateLayout, build_layout
from parkd_engine.arenas.row_space import ROW_GRAIN, footprint
from parkd_engine.families.layer_shapes import layer_kinds
from parkd_engine.families.layer_state import draft_layers
from parkd_engine.families.multimodal import language_config, longest_span
from parkd_engine.families.records import family_of
from parkd_engine.forward.chunk_graphs import LINEAR
from parkd_engine.forward.dense import refusal, unrecorded
from parkd_engine.loading.layer_weights import ModelWeights, model_weights
from parkd_engine.memory import free_bytes, is_card, library_bytes, usable_bytes
from parkd_engine.weights.host_experts import room_bytes
from parkd_engine.workspace import chunk_workspace, numbers_bytes

CONTEXT_STEP = 256
"""A context below the model's limit that is chosen here is a multiple of this."""
MIN_CONTEXT = 512
"""The shortest context, in tokens, that is chosen automatically: a shorter one would be useless."""
GRAPH_BYTES, LARGE_GRAPH_BYTES = 2 << 20, 20 << 20
"""What torch's allocator takes at once for the small and the large tensors of a graph's own memory."""
WEIGHT_PARTS = (WEIGHTS, FETCHING, TOWER, DRAFT_HEAD) = ("weights", "fetched experts", "vision tower", "draft head")
ARENA_PARTS = (ROWS, FIXED, WINDOWS, INDEX) = ("rows", "fixed state", "windows", "index")
"""Names of the parts that a `StageArena` holds."""
WORKSPACE = "workspace"


class Part(NamedTuple):
    """One line of the account."""

    name: str
    constant_bytes: int
    """With one seat."""
    bytes_a_token: float = 0.0
    """Additional bytes for each token of context."""
    bytes_a_seat: int = 0
    """Additional bytes for each seat but the first."""
    is_of_rows: bool = False
    """Whether `bytes_a_token` counts the rows of all seats together, not the longest conversation's."""

    def at(self, context_tokens: int, seats: int = 1, row_tokens: int | None = None) -> int:
        """Its bytes, with `row_tokens` rows for all seats together; None: as many as a context."""
        tokens = row_tokens if self.is_of_rows and row_tokens is not None else context_tokens
        return self.constant_bytes + (seats - 1) * self.bytes_a_seat + int(tokens * self.bytes_a_token)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The account of one stage: the layers `[first_layer, end_layer)` on `device`."""

    device: str
    first_layer: int
    end_layer: int
    parts: tuple[Part, ...]

    @property
    def constant_bytes(self) -> int:
        return sum(part.constant_bytes for part in self.parts)

    @property
    def bytes_a_token(self) -> float:
        return sum(part.bytes_a_token for part in self.parts)

    @property
    def bytes_a_seat(self) -> int:
        """Bytes for each seat but the first, besides its rows."""
        return sum(part.bytes_a_seat for part in self.parts)

    @property
    def bytes_a_row(self) -> float:
        """Bytes for each row beyond a context, where several seats have rows."""
        return sum(part.bytes_a_token for part in self.parts if part.is_of_rows)

    def lines(self, context_tokens: int, seats: int = 1, row_tokens: int | None = None) -> Mapping[str, int]:
        """Name of each part -> its bytes (as `Part.at`); parts that take nothing are left out."""
        return {part.name: size for part in self.parts if (size := part.at(context_tokens, seats, row_tokens))}

    def total(self, context_tokens: int, seats: int = 1, row_tokens: int | None = None) -> int:
        """Bytes of all parts."""
        return sum(self.lines(context_tokens, seats, row_tokens).values())

    def without(self, *names: str) -> StageMemory:
        """The account without these parts."""
        kept = tuple(part for part in self.parts if part.name not in names)
        return StageMemory(self.device, self.first_layer, self.end_layer, kept)

    def beside_weights(self) -> StageMemory:
        """What the stage takes once its weights are in place."""
        return self.without(*WEIGHT_PARTS)


def window_room(settings: Any, config: EngineConfig) -> WindowRoom:
    """Window room for chunks of the batch size, or of an image that must be read in one chunk. `settings` is the
    library's configuration of the whole model."""
    return WindowRoom(max(config.chunk_tokens, longest_span(settings)), config.window_slack_tokens)


class ModelMemory:
    """The accounts of all stages that a model could be split into."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        layout: EngineConfig,
        library: Callable[[str], int] = library_bytes,
        *,
        host_layers: Collection[int] = (),
    ) -> None:
        """`config` is the library's configuration of the whole model, which names its draft head if it has one; `dtype`
        the compute dtype. `library` measures what the matrix library takes on a device. `host_layers` are those whose
        routed experts stay in main memory."""
        self._config, self._dtype, self._layout = config, dtype, layout
        self._text = language_config(config)
        self._kv_dtype = kv_dtype_of(layout.kv_format, dtype)
        self.host_layers = tuple(sorted(host_layers))
        self._weights: ModelWeights = model_weights(
            config, dtype, on_cpus=all(torch.device(device).type == "cpu" for device in layout.devices)
        )
        self._room = window_room(config, layout)
        self._library = {device: library(device) for device in dict.fromkeys(layout.devices)}
        self._guesses = layout.guesses if draft_layers(self._text) else 0
        self._known: dict[tuple[int, int, int], StageMemory] = {}
        cards = all(is_card(device) for device in layout.devices)
        self._can_be_recorded = cards and unrecorded(self._text, dtype) is None

    def with_host_layers(self, host_layers: Collection[int]) -> ModelMemory:
        """The same with the routed experts of these layers in main memory."""
        other = copy.copy(self)
        other.host_layers, other._known = tuple(sorted(host_layers)), {}
        return other

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts in full precision."""
        return tuple(layer for layer, size in enumerate(self._weights.experts) if size)

    @property
    def has_coded_experts(self) -> bool:
        """Whether routed experts are stored as codes."""
        return self._weights.has_coded_experts

    @property
    def host_bytes(self) -> int:
        """Main memory for experts that stay there."""
        return sum(self._weights.experts[layer] for layer in self.host_layers)

    @property
    def _is_recorded(self) -> bool:
        return self._can_be_recorded and not self.host_layers

    def stages(self, ranges: Sequence[tuple[int, int]]) -> tuple[StageMemory, ...]:
        """The accounts of stages with the layers `[first, end)` each, in the order of the devices."""
        return tuple(self.stage(index, first, end) for index, (first, end) in enumerate(ranges))

    def stage(self, index: int, first: int, end: int) -> StageMemory:
        """The account of the layers `[first, end)` on the device of stage `index`."""
        key = (index, first, end)
        if key not in self._known:
            (layout,) = build_layout(self._config, [(first, end)], self._kv_dtype, self._dtype)
            parts = self._weight_parts(index, first, end) + self._state_parts(layout)
            parts += self._computing_parts(index, layout)
            self._known[key] = StageMemory(self._layout.devices[index], first, end, parts)
        return self._known[key]

    def _weight_parts(self, index: int, first: int, end: int) -> tuple[Part, ...]:
        weights, devices = self._weights, self._layout.devices
        is_last = end == len(weights.layers)
        has_embedding = devices[index] == devices[0]  # That of the first stage, if this is another one.
        ends = weights.embedding if first == 0 else 0
        if is_last:
            ends += weights.last + (0 if weights.is_tied and has_embedding else weights.head)
        shared = weights.everywhere if devices.index(devices[index]) == index else 0
        elsewhere = [layer for layer in self.host_layers if first <= layer < end]
        ends -= sum(weights.experts[layer] for layer in elsewhere)
        return (
            Part(WEIGHTS, sum(weights.layers[first:end]) + ends + shared),
            Part(FETCHING, room_bytes(weights.expert, weights.experts_a_layer) if elsewhere else 0),
            Part(TOWER, weights.tower if first == 0 else 0),
            Part(DRAFT_HEAD, weights.draft if is_last else 0),
        )

    def _state_parts(self, layout: StageStateLayout) -> tuple[Part, ...]:
        steps = self._guesses if layout.step_fields else 0
        return (
            Part(ROWS, 0, layout.row_bytes, is_of_rows=True),
            _of_each_seat(FIXED, layout.fixed_bytes),
            _of_each_seat("checkpoints", layout.fixed_bytes * self._layout.ctx_checkpoints),
            _of_each_seat("states behind guesses", layout.fixed_bytes * steps),
            _of_each_seat(WINDOWS, layout.window_bytes(self._room.tokens)),
            Part(INDEX, 0, layout.index_bytes_a_token, is_of_rows=True),
        )

    def _computing_parts(self, index: int, layout: StageStateLayout) -> tuple[Part, ...]:
        device = self._layout.devices[index]
        read = (self._config, self._room.chunk_tokens, self._dtype, self._kv_dtype, device)
        work = chunk_workspace(*read)
        made = numbers_bytes(self._weights.codes, self._dtype.itemsize, on_card=is_card(device))
        streams = 2 if self._is_recorded else 1
        is_first = self._layout.devices.index(device) == index
        return (
            self._graphs(layout, read),
            Part(WORKSPACE, work.constant_bytes + made, work.bytes_a_token),
            Part("library", streams * self._library[device] if is_first else 0),
        )

    def _graphs(self, layout: StageStateLayout, read: tuple[Any, int, torch.dtype, torch.dtype, str]) -> Part:
        """Decode steps of one token and of a token with guesses, the draft head's guess, and linear layers of a whole
        chunk, which share the memory of their intermediate results. Graphs of several seats share it too, but each has
        its own logits."""
        if not self._is_recorded:
            return Part("graphs", 0)
        text, is_last = self._text, layout.end_layer == len(self._weights.layers)
        steps = (1, 1 + self._guesses) if self._guesses else (1,)
        each = GRAPH_BYTES
        if refusal(text, self._dtype, {self._kv_dtype}) is not None:
            each += LARGE_GRAPH_BYTES
        logits = sum(steps) * int(text.vocab_size) * torch.float32.itemsize if is_last else 0
        decoding = each * (len(steps) + bool(self._guesses and is_last)) + logits
        of_a_seat = GRAPH_BYTES + logits
        kinds = layer_kinds(text)[layout.first_layer : layout.end_layer]
        if LINEAR not in kinds or family_of(text).recorded_chunks is None:
            return Part("graphs", decoding, bytes_a_seat=of_a_seat)
        flow = read[1] * int(text.hidden_size) * self._dtype.itemsize
        made = numbers_bytes(self._weights.codes, self._dtype.itemsize, on_card=True)
        chunks = flow + made + chunk_workspace(*read, linear_only=True).constant_bytes
        return Part("graphs", decoding + chunks, bytes_a_seat=of_a_seat)


def _of_each_seat(name: str, size: int) -> Part:
    return Part(name, size, bytes_a_seat=size)


def device_needs(stages: Sequence[StageMemory], seats: int = 1) -> Mapping[str, tuple[int, float]]:
    """Device -> constant bytes, and bytes for each token of context, of all stages on it, with rows for one context.
    They run one after the other, so the largest workspace serves all."""
    needs: dict[str, tuple[int, float]] = {}
    for device, mine in _by_device(stages).items():
        held = [stage.without(WORKSPACE) for stage in mine]
        work = [part for stage in mine for part in stage.parts if part.name == WORKSPACE]
        constant = sum(stage.constant_bytes + (seats - 1) * stage.bytes_a_seat for stage in held)
        constant += max((p.constant_bytes for p in work), default=0)
        each = sum(stage.bytes_a_token for stage in held) + max((p.bytes_a_token for p in work), default=0.0)
        needs[device] = constant, each
    return needs


def check_asked_context(asked_tokens: int | None, model_tokens: int) -> None:
    """Raises ModelError for a context that is longer than the model's limit."""
    if asked_tokens is not None and asked_tokens > model_tokens:
        raise ModelError(
            f"A context of {asked_tokens} tokens was requested, but the model supports at most {model_tokens}. "
            f"Ask for {model_tokens} or fewer."
        )


def choose_context(
    stages: Sequence[StageMemory],
    model_tokens: int,
    asked_tokens: int | None,
    *,
    seats: int = 1,
    reserved: Callable[[], int] = lambda: 0,
    free: Callable[[str], int] = free_bytes,
) -> int:
    """Context length in tokens: `asked_tokens`, or the most that fits beside `seats` seats, up to the model's own
    limit.

    Call it when the weights are loaded, with accounts `beside_weights`. `free` returns the free bytes of a device;
    `reserved`, asked after it, the bytes of main memory that are set aside for parked state. Raises ModelError,
    with numbers, if the context does not fit or is longer than the model's limit.
    """
    check_asked_context(asked_tokens, model_tokens)
    tightest = min(_rooms(stages, seats, reserved, free).values(), key=lambda room: room.tokens)
    if asked_tokens is not None:
        if asked_tokens > tightest.tokens:
            raise ModelError(tightest.shortage(asked_tokens))
        return asked_tokens
    if tightest.tokens >= model_tokens:
        return model_tokens
    chosen = tightest.tokens // CONTEXT_STEP * CONTEXT_STEP
    if chosen < (least := min(MIN_CONTEXT, model_tokens)):
        raise ModelError(tightest.shortage(least))
    return chosen


def choose_seats(
    stages: Sequence[StageMemory],
    context_tokens: int,
    asked: int | None,
    *,
    reserved: Callable[[], int] = lambda: 0,
    free: Callable[[str], int] = free_bytes,
) -> tuple[int, int]:
    """The number of seats, and the rows that they have together: for `asked` seats as many rows as fit, from one
    context to one for each; None: as many seats with a whole context each as fit, up to `AUTO_SEATS`.

    Call it behind `choose_context`, with its arguments.
    """
    by_device = _by_device(stages)

    def spare(seats: int) -> float:
        """Rows that fit everywhere beside one context."""
        rooms = _rooms(stages, seats, reserved, free)
        each = {device: sum(stage.bytes_a_row for stage in mine) for device, mine in by_device.items()}
        left = {device: room.left(context_tokens) for device, room in rooms.items()}
        return min(left[device] // each[device] if each[device] else 0 for device in rooms)

    whole = footprint(context_tokens)
    if asked is None:
        counts = range(AUTO_SEATS, 1, -1)
        asked = next((seats for seats in counts if spare(seats) >= seats * whole - context_tokens), 1)
    if asked == 1:
        return 1, context_tokens
    fitting = context_tokens + int(spare(asked))
    return asked, max(whole, min(asked * whole, fitting // ROW_GRAIN * ROW_GRAIN))


def _rooms(
    stages: Sequence[StageMemory], seats: int, reserved: Callable[[], int], free: Callable[[str], int]
) -> Mapping[str, _Room]:
    rooms: dict[str, _Room] = {}
    for device, (constant, each) in device_needs(stages, seats).items():
        there = free(device)
        rooms[device] = _Room(device, there, reserved() if device == "cpu" else 0, constant, each)
    return rooms


@dataclass(frozen=True, slots=True)
class _Room:
    """What a device has for state, and what stages need there."""

    device: str
    free_bytes: int
    reserved_bytes: int
    constant_bytes: int
    bytes_a_token: float

    @property
    def tokens(self) -> int:
        """Tokens of context that fit; less than 0 if not even the constant part does."""
        room = usable_bytes(self.free_bytes, self.device) - self.reserved_bytes - self.constant_bytes
        return int(room // self.bytes_a_token)

    def left(self, tokens: int) -> int:
        """Bytes that may be used beside a context of so many tokens; less than 0 if it does not fit."""
        return usable_bytes(self.free_bytes, self.device) - self.reserved_bytes - self.needed(tokens)

    def needed(self, tokens: int) -> int:
        return self.constant_bytes + int(tokens * self.bytes_a_token)

    def shortage(self, asked: int) -> str:
        """Why `asked` tokens do not fit, and what to do."""
        beside = usable_bytes(self.free_bytes, self.device) - self.needed(asked)
        if self.reserved_bytes and beside >= 0:
            return (
                f"Parked conversations are to have {_mib(self.reserved_bytes)} MiB of the {_mib(self.free_bytes)} MiB "
                f"that are free on {self.device} once the weights are loaded, which leaves too little for a context of "
                f"{asked} tokens ({_mib(self.needed(asked))} MiB) and a margin. Choose a --conversation-cache-mib of "
                f"at most {beside >> 20}, or a smaller --ctx-size."
            )
        fitting = max(self.tokens, 0)
        less = f"Choose a --ctx-size of at most {fitting}" if fitting else "Choose a smaller --ctx-size"
        budget = ", a smaller --conversation-cache-mib" if self.reserved_bytes else ""
        return (
            f"A context of {asked} tokens needs {_mib(self.needed(asked))} MiB on {self.device} beside the weights, "
            f"where {_mib(max(0, usable_bytes(self.free_bytes, self.device) - self.reserved_bytes))} MiB are free "
            f"beside a margin: {fitting} tokens fit. {less}{budget}, or a smaller model."
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _by_device(stages: Sequence[StageMemory]) -> Mapping[str, list[StageMemory]]:
    grouped: dict[str, list[StageMemory]] = {}
    for stage in stages:
        place = torch.device(stage.device)
        grouped.setdefault("cpu" if place.type == "cpu" else str(place), []).append(stage)
    return grouped
