"""Report 9: a reply continued another conversation. Whoever hands back the wrong state, what is served is verified
first: the units of what was found against the prompt's, and the bytes that come back against their checksums."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parkd.state import Transfer
from parkd.store.records import Parked
from parkd.types import TurnRequest
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import Messages, running
from tests.integration.api.test_api_switching import never_parked, opening, resumable, turn_after

pytestmark = pytest.mark.anyio
KINDS = pytest.mark.parametrize("kind", [FakeEngine, FakeOpaqueEngine], ids=["rows", "opaque"])


@KINDS
async def test_a_store_that_finds_another_conversation_is_not_believed(
    kind: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(kind(stages=2)) as server:
        await server.chat(opening("a"))
        await server.chat(opening("b"))
        await server.settled()
        assert server.store is not None
        ours = server.identity.build(TurnRequest(messages=opening("a")))
        other = server.store.candidates(ours.key.digest, ours.prefix_hashes)[0][0]

        def finds_the_other(*_: Any) -> list[tuple[Parked, int]]:
            return [(other, len(other.prefix_hashes))]

        monkeypatch.setattr(server.store, "candidates", finds_the_other)
        asked = opening("c", system="You answer otherwise.")
        answer = await server.chat(asked)
        assert answer.reused <= resumable([int(unit) for unit in other.units], server.prompt_tokens(asked))
        assert answer.text == never_parked(asked)


@KINDS
async def test_bytes_of_another_conversation_are_caught_and_the_turn_reads_cold(kind: type[FakeEngine]) -> None:
    def holding(messages: Messages) -> FakeEngine:
        engine = kind(stages=2)
        ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
        engine.extend(ids, cancel=threading.Event())
        return engine

    engine = kind(stages=2)
    async with running(engine) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        await server.settled()
        other, restore = holding(opening("other", 3000)), engine.restore

        def restore_the_other(transfer: Transfer) -> None:
            """Its bytes, whole and well-formed, where a's were."""
            other.truncate(transfer.stop)
            stages = tuple(
                replace(stage, rows=tuple(replace(run, buffer=np.empty_like(run.buffer)) for run in stage.rows))
                for stage in transfer.stages
            )
            swapped = replace(transfer, stages=stages)
            other.capture(replace(swapped, checksums=None, resume_at=None))
            restore(swapped)

        engine.restore = restore_the_other  # type: ignore[method-assign]
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("cold", 0)
        assert "restore failed" in second.headers["x-parkd-why"]
        assert second.text == never_parked(a2)
