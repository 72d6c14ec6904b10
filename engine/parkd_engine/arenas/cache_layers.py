"""Cache layers over fixed state: sliding windows, convolutions and recurrences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from parkd_engine.arenas.placed import PlacedRows, PlacedStates, TokenPlace


class WindowTimeline:
    """Where tokens lie in the buffers of the layers with a window of `window` tokens: at the same place in each, even
    after a forward pass that failed between two of them.

    token    base ...... floor - (window-1) ...... position ...... base + capacity
    buffer   |-- slack --|------ window - 1 -------|-- written now --|-- free --|

    When the buffers are full, the window and up to `slack` tokens before it move to the front. The timeline can always
    be cut back by those `slack` tokens without a checkpoint.
    """

    def __init__(self, window: int, capacity: int, slack: int) -> None:
        self.window = window
        self.capacity = capacity
        self.slack = slack
        self.position = 0
        self.base = 0
        self.buffers: list[torch.Tensor] = []
        """Keys and values of all layers, each `[capacity, heads, head_dim]`."""

    @property
    def past(self) -> int:
        """The number of tokens before the position that are in the window."""
        return min(self.position, self.window - 1)

    @property
    def floor(self) -> int:
        """The lowest position whose whole window is still in the buffers."""
        return self.base + self.window - 1 if self.base else 0

    def begin(self, position: int) -> None:
        self.position = position
        if position == 0:
            self.base = 0

    def restart(self, position: int) -> None:
        """Makes the buffers start with the window before `position`, which each layer unpacks next."""
        self.position = position
        self.base = position - self.past

    def room_for(self, count: int) -> int:
        """Returns the buffer index for `count` tokens from the position on. Raises ValueError if they can never fit."""
        if self.position - self.base + count > self.capacity:
            self._make_room(count)
        return self.position - self.base

    def _make_room(self, count: int) -> None:
        room = self.capacity - count
        if room < self.window - 1:
            raise ValueError(f"{count} tokens at once do not fit a window's buffer of {self.capacity}")
        at = self.position - self.base
        kept = min(at, room, self.window - 1 + self.slack)
        # Allocated before anything moves: a failure in between would leave some buffers moved and others not.
        between = torch.empty_like(self.buffers[0][:kept])
        for buffer in self.buffers:
            between.copy_(buffer[at - kept : at])
            buffer[:kept] = between
        self.base = self.position - kept


class ArenaSlidingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one sliding-window layer, in a buffer ordered by position (`WindowTimeline`).

    The returned views cover the last `window - 1` tokens and the new ones, as those of the transformers layer do.
    """

    is_sliding = True

    def __init__(
        self,
        live: tuple[torch.Tensor, torch.Tensor],
        packed: tuple[torch.Tensor, torch.Tensor],
        timeline: WindowTimeline,
    ) -> None:
        """`live` is keys and values `[capacity, heads, head_dim]`; `packed` their fixed state `[window - 1, ...]`."""
        super().__init__()
        self.timeline = timeline
        self.place: TokenPlace | None = None
        """Set while the forward pass of a step is recorded."""
        self.is_initialized = True
        self._live = live
        self._packed = packed
        timeline.buffers += live

    def begin(self, position: int) -> None:
        """Nothing to do: the position is set on the timeline, once for all its layers."""

    def placed(self) -> PlacedRows:
        """The layer's buffers and where a step's tokens go. Only while a step is recorded."""
        assert self.place is not None, "nothing is recorded"
        window = self.timeline.window
        return PlacedRows(*self._live, None, self.place.slot(window), window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffer was allocated before the first forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[PlacedStates, PlacedStates]:
        """Writes `[1, heads, q, head_dim]` at the position; returns `[1, heads, min(position, window-1) + q, dim]`."""
        if self.place is not None:
            keys, values = self._live
            slot = self.place.slot(self.timeline.window)
            return (
                PlacedStates.written(self.place, keys, key_states, slot, self.timeline.window),
                PlacedStates.written(self.place, values, value_states, slot, self.timeline.window),
            )
        count = key_states.shape[-2]
        at = self.timeline.room_for(count)
        first = at - self.timeline.past
        views = []
        for buffer, states in zip(self._live, (key_states, value_states), strict=True):
            buffer[at : at + count] = states[0].transpose(0, 1)
            views.append(_heads_first(buffer[first : at + count], states))
        return views[0], views[1]

    def packing(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The window before the position, in the fixed state and in the buffer, both `[past, heads, head_dim]`: of the
        keys, then of the values."""
        count, at = self.timeline.past, self.timeline.position - self.timeline.base
        for buffer, packed in zip(self._live, self._packed, strict=True):
            yield packed[:count], buffer[at - count : at]

    def beyond(self) -> tuple[torch.Tensor, ...]:
        """What the fixed state has room for beyond that window: of keys and of values, if anything."""
        count = self.timeline.past
        return tuple(packed[count:] for packed in self._packed if len(packed) > count)

    def get_seq_length(self) -> int:
        return self.timeline.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.timeline.past
        return past + query_length, self.timeline.position - past

    def get_max_length(self) -> int:
        return self.timeline.window


class ArenaLinearLayer(LinearAttentionLayer):  # type: ignore[misc]
    """Convolution and recurrent states of one layer, as views of an arena's fixed state.

    The transformers base class writes them in place; this one keeps it from allocating. There is a previous state
    unless the position is 0.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        """`states`: `conv_0`, `recurrent_0`, ... -> `[1, ...]`, views of the fixed state."""
        super().__init__(number_of_states=sum(name.startswith("conv_") for name in states))
        self._views = dict(states)

    def begin(self, position: int) -> None:
        for index in range(self.number_of_states):
            conv, recurrent = self._views[f"conv_{index}"], self._views.get(f"recurrent_{index}")
            self.has_previous_state[index] = position > 0
            self.conv_states[index] = conv
            self.conv_kernel_size[index] = conv.shape[-1]
            self.is_conv_states_initialized[index] = True
            self.recurrent_states[index] = recurrent
            self.is_recurrent_states_initialized[index] = recurrent is not None
        self.dtype, self.device = self._views["conv_0"].dtype, self._views["conv_0"].device

    def clear(self) -> None:
        """Sets the state to zeros, which a forward pass continues from as from no state."""
        for view in self._views.values():
            view.zero_()

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Raises ValueError: called only for a state that is missing from the layout."""
        raise ValueError("the layer keeps a recurrent state that its layout does not have")

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **arguments: Any) -> torch.Tensor:
        self._check("conv", state_idx, conv_states.shape[:-1], conv_states.dtype)
        full: torch.Tensor = super().update_conv_state(conv_states, state_idx, **arguments)
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **arguments: Any
    ) -> torch.Tensor:
        if f"recurrent_{state_idx}" in self._views:
            self._check("recurrent", state_idx, recurrent_states.shape, recurrent_states.dtype)
        kept: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **arguments)
        return kept

    def _check(self, kind: str, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raises ValueError if shape or dtype differ from the layout's: a copy would silently broadcast or round."""
        view = self._views[f"{kind}_{index}"]
        expected = view.shape[:-1] if kind == "conv" else view.shape
        if shape != expected or dtype != view.dtype:
            raise ValueError(f"{kind} state {index} is {tuple(shape)} {dtype}; its layout says {tuple(expected)}")


def _heads_first(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[n, heads, head_dim]` as `[1, heads, n, head_dim]`, in the dtype of `like`."""
    return rows.transpose(0, 1).unsqueeze(0).to(like.dtype)
