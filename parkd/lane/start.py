"""How a turn starts: the pure decision over what is live, what is parked and what things cost. A replay calls it too.

live     truncate to the common prefix and read on
parked   restore rows [keep_rows, position) and read on; rows [0, keep_rows) are in the arenas already
cold     read everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from parkd.identity.matcher import common_prefix, image_at, resumable_position
from parkd.lane.live_rows import LiveRows
from parkd.lane.seating import displaced, harm
from parkd.state import Costs, Grain, StateLayout
from parkd.store.records import Parked, Tier
from parkd.types import CacheOutcome, PromptIdentity, Unit, Units

DISK_READ_S = 0.001
"""Cost of a read from disk besides its bytes: opening files and switching between threads."""


CHEAPER = "reading is cheaper"
NO_STATE = "no exact state"
NOT_ASKED = "the request asked for no cache"
OWN_GONE = "what this key sent before is not parked any more"
"""How reasons begin that `cause.py` recognises."""


@dataclass(frozen=True, slots=True, eq=False)
class Seated:
    """What one seat of the engine holds, and where that can be cut: at `checkpoints`, and anywhere from `rewind_floor`
    on. A floor of None means 0 without fixed state, and the rows' position with it."""

    rows: LiveRows = field(default_factory=LiveRows)
    checkpoints: Sequence[int] = ()
    rewind_floor: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """One way to begin a turn: reuse state up to `position`, and read the rest of the prompt."""

    source: CacheOutcome
    """Where the state is now, which decides what moving it costs."""
    position: int = 0
    keep_rows: int = 0
    """Live rows `[0, keep_rows)` stay in the arenas; the others are overwritten."""
    parked: Parked | None = None
    """The conversation to restore; None: none."""
    move_bytes: int = 0
    """Bytes that a restore copies."""
    promote_bytes: int = 0
    """Bytes that must be read into RAM first; the most, since some of its blocks may be there."""
    seat: int = 0
    """The number of the seat in which the turn runs."""
    displaced: tuple[int, ...] = ()
    """The seats whose conversations make way for its rows."""
    is_file: bool = False
    """The state stays in a file, from which its engine reads it: its place in RAM holds none of its bytes."""

    common: int = 0
    """Tokens of the longest prefix that the prompt shares with anything live or parked."""
    known: int = 0
    """Tokens of the conversation that shares it."""
    resumable: int = 0
    """The last position that the turn could start from, whatever it costs."""
    nearest: Units | None = field(default=None, compare=False, repr=False)
    """The units that share `common` with the prompt, if both continue differently after it."""

    @property
    def is_on_disk(self) -> bool:
        """Whether the conversation must be read into RAM first."""
        return self.parked is not None and self.parked.tier is Tier.DISK

    @property
    def outcome(self) -> CacheOutcome:
        """For reports: state that was promoted for this start, or stays in a file, counts as restored from disk."""
        if self.is_file or (self.parked is not None and self.parked.tier is not Tier.RAM):
            return CacheOutcome.RESTORED_DISK
        return self.source

    def cost_s(self, prompt_tokens: int, cost: Costs) -> float:
        """Expected seconds until the whole prompt is read."""
        moving_s = cost.moving_s(self.move_bytes, from_disk=False) + promotion_s(cost, self.promote_bytes)
        return cost.reading_s(self.position, prompt_tokens) + moving_s


def promotion_s(cost: Costs, size_bytes: int) -> float:
    """Expected seconds to read `size_bytes` from disk into RAM, from where they are then restored."""
    return cost.moving_s(size_bytes, from_disk=True) + DISK_READ_S if size_bytes else 0.0


def cold_start() -> Start:
    return Start(CacheOutcome.COLD)


def cheapest(
    starts: Iterable[Start],
    prompt_tokens: int,
    cost: Costs,
    *,
    compared: Callable[[Start], Start] = lambda start: start,
    harm_of: Callable[[Start], tuple[int, ...]] = lambda _start: (),
) -> Start:
    """The cheapest start, by what `compared` makes of each; of equally cheap ones, the one that moves least, then the
    one that reuses most, then the one that does least harm to other seats, then the first.

    Raises ValueError if there is none; a caller always has `cold_start`.
    """

    def order(start: Start) -> tuple[float, int, int, tuple[int, ...]]:
        judged = compared(start)
        return judged.cost_s(prompt_tokens, cost), judged.move_bytes, -judged.position, harm_of(start)

    return min(starts, key=order)


def decide_start(
    prompt: PromptIdentity,
    seats: Sequence[Seated],
    candidates: Sequence[Parked],
    *,
    layout: StateLayout,
    cost: Costs,
    reuses: bool = True,
    on_disk: bool = True,
    has_spare: bool = False,
    row_tokens: int = 0,
    answer_tokens: int = 0,
) -> Start:
    """The cheapest exact start, in whichever of the seats; of equal starts, the one that costs the other seats least
    (`seating.harm`). Seats are given in the order of their use, the least recently used first. Without `reuses`
    the start is cold; without `on_disk`, what is only on disk is left out.

    `has_spare`: the engine can keep more conversations than it has seats. With it a live conversation that is parked is
    not cut to less than half, since returning to it would need a restore; with several seats no live one is.
    `row_tokens` are the rows that all seats have together (0: each has its own); the turn takes those of the prompt
    and of `answer_tokens`.
    """
    length = len(prompt)
    starts = [Start(CacheOutcome.COLD, seat=number) for number in range(len(seats))]
    deepest_common, deepest_known, deepest_position = 0, 0, 0
    nearest: Units | None = None
    for number, seated in enumerate(seats if reuses else ()):
        live = seated.rows
        if live.key != prompt.key:
            continue
        common = common_prefix(live.units, prompt.units)
        floor = seated.rewind_floor if seated.rewind_floor is not None else layout.resume.floor
        floor = live.position if floor is None else floor
        position = resumable_position(common, length, floor, seated.checkpoints, prompt.images)
        is_kept = len(seats) > 1 or (has_spare and live.parked_id is not None)
        is_worth_more = is_kept and live.position - position > position
        if position > 0 and not is_worth_more:
            starts.append(Start(CacheOutcome.LIVE, position, keep_rows=position, seat=number))
        if common > deepest_common:
            deepest_common, deepest_known, nearest = common, live.position, live.units
        deepest_position = max(deepest_position, position)
    for parked in candidates if reuses else ():
        if parked.layout_digest != layout.digest or (parked.tier is Tier.DISK and not on_disk):
            continue
        common = common_prefix(parked.units, prompt.units)
        checkpoints = [checkpoint.position for checkpoint in parked.checkpoints]
        position = resumable_position(common, length, layout.resume.floor, checkpoints, prompt.images)
        if common > deepest_common:
            deepest_common, deepest_known, nearest = common, len(parked.units), parked.units
        deepest_position = max(deepest_position, position)
        if position > 0:
            for number, seated in enumerate(seats):
                starts.append(restore_of(parked, position, number, seated.rows, layout))
    if deepest_common == min(deepest_known, length) or deepest_common <= prompt.template_tokens:
        nearest = None  # the head of the other, or none of its own words in common: nothing diverged
    best = cheapest(
        (_displacing(start, seats, length + answer_tokens, row_tokens, layout.block_tokens) for start in starts),
        length,
        cost,
        compared=lambda start: _compared(start, seats, layout),
        harm_of=lambda start: harm(_lost(start, seats)),
    )
    return replace(best, common=deepest_common, known=deepest_known, resumable=deepest_position, nearest=nearest)


def _displacing(start: Start, seats: Sequence[Seated], tokens: int, row_tokens: int, block_tokens: int) -> Start:
    positions = [seated.rows.position for seated in seats]
    return replace(start, displaced=displaced(positions, start.seat, tokens, row_tokens, block_tokens))


def _lost(start: Start, seats: Sequence[Seated]) -> tuple[int, ...]:
    """The seats whose conversations are not live any more after `start`, or cut to less than half."""
    held = seats[start.seat].rows.position
    if start.source is CacheOutcome.LIVE or held - start.keep_rows <= start.keep_rows:
        return start.displaced
    return (*start.displaced, start.seat)


def _compared(start: Start, seats: Sequence[Seated], layout: StateLayout) -> Start:
    """What `start` is compared by. That few of a conversation's rows need not be copied is no reason to give it up, if
    there is another seat."""
    if len(seats) > 1 and start.keep_rows and start.seat in _lost(start, seats):
        return replace(start, move_bytes=start.move_bytes + start.keep_rows * layout.row_bytes)
    return start


def restore_of(parked: Parked, position: int, seat: int, live: LiveRows, layout: StateLayout) -> Start:
    """The start that restores a parked conversation up to `position` over what is live in a seat."""
    # The last block is restored even if it is live: there is always a row to copy, beside a checkpoint at its end.
    whole = position * layout.row_bytes + layout.fixed_bytes
    size = layout.block_tokens
    keep = min(live.shared_rows(parked.blocks), (position - 1) // size * size)
    if layout.is_opaque:  # restored whole, then cut
        keep, whole = 0, parked.position * layout.row_bytes + layout.fixed_bytes
    moved, is_file = whole - keep * layout.row_bytes, layout.grain is Grain.FILE
    if parked.tier is Tier.DISK:
        return Start(CacheOutcome.RESTORED_DISK, position, keep, parked, moved, whole, seat, is_file=is_file)
    return Start(CacheOutcome.RESTORED_RAM, position, keep, parked, moved, seat=seat, is_file=is_file)


def as_known_to_key(prompt: PromptIdentity, start: Start, own: Units) -> Start:
    """The same start, as far as a key may be told why it is not better: compared with `own`, which is what the key
    itself sent and got, not with what other keys of the namespace said."""
    common = common_prefix(own, prompt.units)
    if common < start.position:
        return replace(start, common=0, known=0, resumable=0, nearest=None)
    differs = common < min(len(own), len(prompt))
    resumable = min(start.resumable, common)
    return replace(start, common=common, known=len(own), resumable=resumable, nearest=own if differs else None)


def differs(prompt: PromptIdentity, start: Start, unit: Unit = Unit.TOKEN) -> str:
    """Where a prompt leaves what was known of it; empty if it nowhere does."""
    if start.common <= prompt.template_tokens or start.common >= min(start.known, len(prompt)):
        return ""
    label = next((span.label for span in prompt.segments if span.start <= start.common < span.stop), "the prompt")
    image = image_at(prompt, start.common)
    return f"differs from {unit} {start.common} in {f'{image} of ' if image else ''}{label}"


def explain(prompt: PromptIdentity, start: Start, gone: str) -> str:
    """Why tokens are read although part of this prompt was known; empty if there is nothing to explain.

    For the header and the log, so it contains no text of the prompt. `gone` is the store's explanation of what it no
    longer holds beyond the common prefix.
    """
    position, length = start.position, len(prompt)
    if position >= length - 1:
        return ""
    if gone:
        return gone
    if start.common <= prompt.template_tokens:
        return ""
    if position < start.resumable:
        return f"{CHEAPER} than restoring {start.resumable} tokens"
    if start.common < min(start.known, length):
        return differs(prompt, start)
    if position < start.common:
        return f"{NO_STATE} between tokens {position} and {start.common}"
    return ""
