"""Capture and restore of states that cannot be cut into rows: the library's state of the sequence, as one buffer.

A state that the library refuses leaves the sequence empty and counts as a miss. A state that it did not take whole is
never used.
"""

from __future__ import annotations

from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.timeline import Timeline
from parkd.engine_adapter.whole_sums import compare_sums, sums_of
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Checksums, Transfer


class WholeMoves:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._sequence = timeline.sequence

    def capture(self, transfer: Transfer) -> Checksums:
        """Raises EngineFailure."""
        [stage] = transfer.stages
        if transfer.stop != self._timeline.position:
            raise EngineFailure(
                f"The engine is at {self._timeline.position}, not at {transfer.stop}: nothing can be parked."
            )
        for run in stage.rows:
            if not self._sequence.read_state(run.buffer, WHOLE):
                raise EngineFailure("llama.cpp wrote a state of another size than it announced.")
        for part in stage.fixed:
            if part.buffer.nbytes:
                held = self._timeline.held(part.position)
                if held.nbytes != part.buffer.nbytes:
                    raise EngineFailure(f"The checkpoint at {part.position} has another size than was announced.")
                part.buffer[:] = held
        return Checksums(sums_of([run.buffer for run in stage.rows]), sums_of([part.buffer for part in stage.fixed]))

    def restore(self, transfer: Transfer) -> None:
        """Raises RestoreFailed, after which the sequence must be emptied."""
        if transfer.start:
            raise RestoreFailed("The parked state is not whole.")
        timeline = self._timeline
        [stage] = transfer.stages
        [run] = stage.rows
        partial = [part for part in stage.fixed if part.buffer.nbytes]
        is_cut = transfer.position < transfer.stop
        if is_cut and timeline.has_fixed_state and [part.position for part in partial] != [transfer.position]:
            raise RestoreFailed(f"There is no partial state of {transfer.position} tokens.")
        compare_sums([run.buffer], transfer.checksums)
        compare_sums([part.buffer for part in stage.fixed], transfer.fixed_checksums)
        timeline.reset()
        timeline.set(run.buffer, WHOLE, transfer.stop)
        if is_cut and timeline.has_fixed_state:
            timeline.set(partial[0].buffer, PARTIAL, transfer.position)
        if is_cut:
            timeline.cut(transfer.position)
