"""Which slots of the pool are free: a pure data structure, without the memory itself.

Slots are numbered over all slabs. Each slab has a range of numbers, and one number is left out between two ranges, so
that slots with consecutive numbers are always adjacent in one slab:

    slab 0            slab 7
    0 1 2 3 4 5   .   7 8 9 10   .
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise


class SlotAllocator:
    """Allocates slots by best fit over runs of free slots. A region is the range of one slab."""

    def __init__(self) -> None:
        self._next_base = 0
        self._bases: list[int] = []
        self._sizes: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._used_slots = self._free_slots = 0
        self._idle: dict[int, None] = {}
        """Regions without used slots, the one that became so first comes first."""
        self._starts: list[int] = []
        """First slots of the free runs, ascending. No two runs touch."""
        self._lengths: list[int] = []
        """Lengths of the same runs."""

    @property
    def free_slots(self) -> int:
        return self._free_slots

    @property
    def used_slots(self) -> int:
        return self._used_slots

    @property
    def regions(self) -> dict[int, int]:
        """The first slot of each region, and how many of its slots are used."""
        return dict(self._used)

    @property
    def idle(self) -> list[int]:
        """First slots of the regions without used slots."""
        return list(self._idle)

    def used(self, base: int) -> int:
        """How many slots of a region are used."""
        return self._used[base]

    def size(self, base: int) -> int:
        return self._sizes[base]

    def region_of(self, slot: int) -> int:
        """The first slot of the region of `slot`."""
        return self._bases[bisect_right(self._bases, slot) - 1]

    def add_region(self, slots: int) -> int:
        """Adds a region of `slots` free slots. Returns its first slot."""
        base = self._next_base
        self._next_base += slots + 1
        self._bases.append(base)
        self._sizes[base] = slots
        self._used[base] = 0
        self._idle[base] = None
        self._free_slots += slots
        self._add_run(base, slots)
        return base

    def remove_region(self, base: int) -> None:
        assert self._used[base] == 0, "a region with slots in use can't be removed"
        at = bisect_left(self._starts, base)
        del self._starts[at], self._lengths[at]
        self._bases.remove(base)
        self._free_slots -= self._sizes[base]
        del self._sizes[base], self._used[base], self._idle[base]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free slots: those after slot `after` if they are free, then by best fit in few runs.

        The caller has checked that there are enough.
        """
        assert count <= self.free_slots, f"{count} slots asked, {self.free_slots} free"
        taken: list[int] = []
        if count and after is not None:
            at = bisect_left(self._starts, after + 1)
            if self._starts[at : at + 1] == [after + 1]:
                taken += self._take(at, count)
        while len(taken) < count:
            taken += self._take(self._best_run(count - len(taken)), count - len(taken))
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Frees slots, run by run: slots that were allocated together are mostly freed together."""
        ascending = sorted(slots)
        breaks = [at for at, (slot, after) in enumerate(pairwise(ascending), 1) if after != slot + 1]
        for start, stop in zip([0, *breaks], [*breaks, len(ascending)], strict=True) if ascending else ():
            first, length = ascending[start], stop - start
            self._add_run(first, length)
            self._count(self.region_of(first), -length)

    def _best_run(self, wanted: int) -> int:
        """Index of the smallest run of at least `wanted` slots, else of the largest; the first of equals."""
        most = max(self._lengths)
        if most > wanted:
            most = min(length for length in self._lengths if length >= wanted)
        return self._lengths.index(most)

    def _take(self, at: int, wanted: int) -> list[int]:
        """Takes up to `wanted` slots from the run at index `at`."""
        start, length = self._starts[at], self._lengths[at]
        count = min(length, wanted)
        if count < length:
            self._starts[at], self._lengths[at] = start + count, length - count
        else:
            del self._starts[at], self._lengths[at]
        self._count(self.region_of(start), count)
        return list(range(start, start + count))

    def _count(self, base: int, taken: int) -> None:
        self._used[base] += taken
        self._used_slots += taken
        self._free_slots -= taken
        if self._used[base] == 0:
            self._idle[base] = None
        else:
            self._idle.pop(base, None)

    def _add_run(self, start: int, length: int) -> None:
        """Adds a free run, and merges it with the runs that it touches."""
        starts, lengths = self._starts, self._lengths
        at = bisect_left(starts, start)
        if at < len(starts):
            assert starts[at] >= start + length, "a slot was freed twice"
            if starts[at] == start + length:
                length += lengths[at]
                del starts[at], lengths[at]
        if at > 0:
            end = starts[at - 1] + lengths[at - 1]
            assert end <= start, "a slot was freed twice"
            if end == start:
                lengths[at - 1] += length
                return
        starts.insert(at, start)
        lengths.insert(at, length)
