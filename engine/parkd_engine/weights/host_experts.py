"""Routed experts that stay in main memory, for models whose experts are larger than the card.

    few tokens     hidden states go to main memory, the CPU computes, the result comes back
    many tokens    the experts that were chosen are fetched, a group at a time, and the card computes:

        main memory   |0|1|2|3|4|5|........................|E|     page-locked, as the model's files have them
                           |     |
        card          |half 0: 2, 5 ..|half 1: 9, 12 ..|           one group is computed while the next is copied

Which is faster depends on the machine and on the number of tokens, so both are measured at start (`choose_way`). Either
way each chosen expert is read once in a forward pass, and the arithmetic is that of the library's own code: products of
one token with one expert, weighted and summed in the order in which the token chose them.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from parkd_engine.moves.checksum import WORD_BYTES, WeightedSum
from parkd_engine.weights.experts import QuantisedExperts
from parkd_engine.weights.page_locks import populate, register_with_cuda, unregister_with_cuda

ROOM_BYTES = 512 << 20
"""Most memory on a device for experts that are being fetched, in two halves, unless two experts take more."""
FETCH_DEADLINE_S = 10.0
"""How long the experts of one layer may take to arrive. At 3 GB/s, the slowest link in use, that is 30 GB."""
TRIED_TOKENS = (1, 4, 16, 64, 256)
"""Numbers of tokens with which both ways are measured, until fetching is faster."""
TRIALS = 3
"""Of which the fastest counts."""
POLL_S = 20e-6
ALIGNMENT_BYTES = 16
"""Products of the matrix library begin at multiples of this."""

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""(into, from): queues the copy of some experts' tensor to the device."""


class ExpertsDamaged(RuntimeError):
    """An expert that arrived on the device is not the one in main memory."""


class ExpertsLate(RuntimeError):
    """Experts did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the experts of a stage are computed."""

    fetched_from_tokens: int = 1
    """Forward passes of at least so many tokens fetch; shorter ones compute in main memory."""
    seconds: Mapping[int, tuple[float, float]] | None = None
    """Tokens -> seconds for one layer in main memory, and fetched, as measured. None: not measured."""


def experts_module(layer: nn.Module, experts: int) -> nn.Module | None:
    """The submodule of a decoder layer with the numbers of its routed experts, `[experts, ...]` each; None if the layer
    has none, or has them as codes."""
    part: nn.Module
    for name, part in layer.named_modules():
        tensors = [] if isinstance(part, QuantisedExperts) else list(part.parameters(recurse=False))
        if name.split(".")[-1] == "experts" and tensors and all(len(each) == experts for each in tensors):
            return part
    return None


def expert_bytes(module: nn.Module) -> int:
    """Bytes of one of its experts in the room on a device."""
    return sum(_padded(each[0].nbytes) for each in module.parameters(recurse=False))


def room_bytes(each_bytes: int, experts: int) -> int:
    """Bytes on a device for fetching experts of `each_bytes`, of which a layer has `experts`: two halves."""
    fitting = max(1, min(experts, ROOM_BYTES // 2 // each_bytes))
    return 2 * fitting * each_bytes


class FetchRoom:
    """The memory on one device for experts that are being fetched. The layers of a stage take turns."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        self.half_bytes = size_bytes // 2
        self._halves = torch.empty((2, self.half_bytes), dtype=torch.uint8, device=device)
        on_card = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_card else None  # type: ignore[no-untyped-call]
        self._computed: list[Any] = [None, None]

    def views(self, half: int, tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
        """For each of `tensors`, `[experts, ...]`, room for `count` experts: `[count, ...]`."""
        found, at = {}, 0
        for name, tensor in tensors.items():
            size = count * tensor[0].nbytes
            found[name] = self._halves[half, at : at + size].view(tensor.dtype).view(count, *tensor.shape[1:])
            at += count * _padded(tensor[0].nbytes)
        return found

    def before_copy(self, half: int) -> None:
        """Makes copies into a half wait for the products that read it before."""
        if self.stream is not None and self._computed[half] is not None:
            self.stream.wait_event(self._computed[half])

    def after_copy(self) -> None:
        """Makes products that follow wait for the copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def after_products(self, half: int) -> None:
        if self.stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._computed[half] = event


class HostExperts(nn.Module):
    """Takes the place of a layer's experts. Its weights are no parameters, so whatever moves the layer to a device
    leaves them."""

    def __init__(
        self,
        experts: nn.Module,
        room: FetchRoom,
        *,
        copy_to: Copy | None = None,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = FETCH_DEADLINE_S,
    ) -> None:
        """`experts` is the library's module, in main memory; its tensors are replaced by page-locked ones if the room
        is on a card. `copy_to` and `clock` are for tests."""
        super().__init__()
        self.way = Way()
        self.fetched = 0
        """Experts copied to the device so far."""
        self._held = (experts,)  # In a tuple, so that it is no submodule.
        self._room = room
        self._copy = copy_to or _copy
        self._clock, self._deadline_s = clock, deadline_s
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        on_card = room.device.type == "cuda"
        self._tensors = {
            name: _kept(experts, name, parameter, lock=on_card)
            for name, parameter in list(experts.named_parameters(recurse=False))
        }
        if on_card:
            weakref.finalize(self, _unlock, [tensor.data_ptr() for tensor in self._tensors.values()])
        self._at_once = min(self.num_experts, room.half_bytes // expert_bytes(experts))
        self._sums = WeightedSum()
        self._expected = self._sums_of_all()

    @property
    def replaced(self) -> nn.Module:
        """The library's module."""
        return self._held[0]

    @property
    def bytes(self) -> int:
        """Bytes of main memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[n, hidden]` of hidden states `[n, hidden]`, the experts that each token chose `[n, k]` and their weights.
        Raises ExpertsDamaged and ExpertsLate."""
        if len(hidden_states) < self.way.fetched_from_tokens:
            return self.computed_there(hidden_states, top_k_index, top_k_weights)
        return self.computed_here(hidden_states, top_k_index, top_k_weights)

    def computed_there(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `forward`, in main memory."""
        (experts,) = self._held
        result: torch.Tensor = experts(hidden.cpu(), index.cpu(), weights.cpu())
        return result.to(hidden.device)

    def computed_here(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `forward`, with the chosen experts fetched."""
        begun_s = self._clock()
        tokens, each = index.shape
        pairs = index.reshape(-1)
        order = torch.argsort(pairs, stable=True)
        counts = np.bincount(pairs.cpu().numpy(), minlength=self.num_experts)
        chosen = np.flatnonzero(counts)
        out = hidden.new_empty((len(pairs), hidden.shape[1]))
        sums: list[dict[str, torch.Tensor]] = []
        begin = 0
        for turn, group in enumerate(_groups(chosen.tolist(), self._at_once)):
            views = self._fetch(group, turn % 2)
            end = begin + int(counts[np.asarray(group)].sum())
            rows, begin = order[begin:end], end
            place = torch.searchsorted(torch.tensor(list(group), device=pairs.device), pairs[rows])
            out[rows] = self._products(views, hidden[rows // each], place)
            sums.append(self._sums_of(views))
            self._room.after_products(turn % 2)
        self._check(chosen, sums, begun_s)
        weighted = out * weights.reshape(-1, 1)
        return weighted.view(tokens, each, -1).sum(1).to(hidden.dtype)

    def _fetch(self, group: Sequence[int], half: int) -> dict[str, torch.Tensor]:
        """The tensors of these experts, `[len(group), ...]`, in one half of the room."""
        views = self._room.views(half, self._tensors, len(group))
        self._room.before_copy(half)
        with nullcontext() if self._room.stream is None else torch.cuda.stream(self._room.stream):
            for at, start, stop in _runs(group):
                for name, tensor in self._tensors.items():
                    self._copy(views[name][at : at + stop - start], tensor[start:stop])
        self.fetched += len(group)
        self._room.after_copy()
        return views

    def _products(self, views: Mapping[str, torch.Tensor], hidden: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The output of one expert for each row: `[rows, hidden]`, not weighted."""
        (experts,) = self._held
        twin = copy.copy(experts)
        twin.__dict__["_parameters"] = {name: nn.Parameter(view, requires_grad=False) for name, view in views.items()}
        twin.__dict__["num_experts"] = len(next(iter(views.values())))
        result: torch.Tensor = twin(hidden, place[:, None], hidden.new_ones((len(hidden), 1)))
        return result

    def _sums_of(self, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Checksums, int64 `[experts]` for each tensor."""
        return {
            name: self._sums.block_sums(view.reshape(-1).view(torch.uint8), view[0].nbytes)
            for name, view in views.items()
        }

    def _sums_of_all(self) -> dict[str, np.ndarray[Any, Any]]:
        """What arrives at first, which every later arrival must equal."""
        found = []
        for turn, group in enumerate(_groups(range(self.num_experts), self._at_once)):
            found.append(self._sums_of(self._fetch(group, turn % 2)))
            self._room.after_products(turn % 2)
        self.fetched = 0
        return {name: torch.cat([each[name] for each in found]).cpu().numpy() for name in self._tensors}

    def _check(self, chosen: np.ndarray[Any, Any], sums: Sequence[Mapping[str, torch.Tensor]], begun_s: float) -> None:
        """Waits for the device. Raises ExpertsLate, and ExpertsDamaged for an expert with another checksum."""
        found = {name: torch.cat([each[name] for each in sums]) for name in self._tensors}
        if self._room.stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._room.device))
            while not event.query():  # type: ignore[no-untyped-call]
                self._check_time(begun_s)
                time.sleep(POLL_S)
        self._check_time(begun_s)
        for name, values in found.items():
            wrong = chosen[values.cpu().numpy() != self._expected[name][chosen]]
            if len(wrong):
                raise ExpertsDamaged(f"expert {wrong[0]} arrived with other bytes in {name} than it has in main memory")

    def _check_time(self, begun_s: float) -> None:
        if self._clock() - begun_s > self._deadline_s:
            raise ExpertsLate(f"experts did not arrive within {self._deadline_s:g} s")


def choose_way(layer: HostExperts, chosen: int, device: torch.device, dtype: torch.dtype, hidden: int) -> Way:
    """Measures one layer both ways, with random tokens that choose `chosen` experts each."""
    draw = torch.Generator().manual_seed(0)
    seconds: dict[int, tuple[float, float]] = {}
    for tokens in TRIED_TOKENS:
        states = torch.randn((tokens, hidden), generator=draw).to(device, dtype)
        index = torch.rand((tokens, layer.num_experts), generator=draw).topk(chosen).indices.to(device)
        weights = states.new_full((tokens, chosen), 1 / chosen)
        there, here = (
            min(_timed(way, device, states, index, weights) for _ in range(TRIALS))
            for way in (layer.computed_there, layer.computed_here)
        )
        seconds[tokens] = there, here
        if here < there:
            return Way(tokens, seconds)
    return Way(TRIED_TOKENS[-1] + 1, seconds)


def _timed(way: Callable[..., torch.Tensor], device: torch.device, *arguments: torch.Tensor) -> float:
    begun_s = time.perf_counter()
    way(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)


def _kept(module: nn.Module, name: str, parameter: nn.Parameter, *, lock: bool) -> torch.Tensor:
    """The parameter's values in main memory, in the module and page-locked if a card is to copy them. Locked memory is
    a copy of its own: a tensor of a file may share its pages with others."""
    tensor = parameter.detach()
    if lock:
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        own.copy_(tensor)
        populate(own.data_ptr(), own.nbytes)
        register_with_cuda(own.data_ptr(), own.nbytes)  # If refused, copies are slower, and as right.
        tensor = own
    elif tensor.device.type != "cpu":
        tensor = tensor.cpu()
    module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    return tensor


def _unlock(addresses: Sequence[int]) -> None:
    for address in addresses:
        unregister_with_cuda(address)


def _padded(size: int) -> int:
    step = max(ALIGNMENT_BYTES, WORD_BYTES)
    return -(-size // step) * step


def _runs(group: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(place in the group, first, end)` of each run of adjacent experts."""
    starts = [0, *(place + 1 for place, (one, other) in enumerate(pairwise(group)) if other != one + 1), len(group)]
    for place, stop in pairwise(starts):
        yield place, group[place], group[stop - 1] + 1


def _groups(experts: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(experts), size):
        yield experts[start : start + size]
