"""One `/completion` from its prompt to its end: what is read, what is generated, and what its slot then holds.

prompt     [0 ........ reused ........ read ....... n-1][n-1]
generated                                               [t0 t1 t2 ... tk]
state      [0 .......................................... ........... tk)        the last one is never run
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parkd.engine_adapter.llama_server.client import UpstreamClient, UpstreamRefused
from parkd.engine_adapter.llama_server.probe import base_body
from parkd.engine_adapter.llama_server.sampling import ANY_OBJECT, OBJECT_GRAMMAR, grammar_of, sampling_fields
from parkd.engine_adapter.llama_server.slot_file import Ids
from parkd.engine_adapter.llama_server.slots import Slot
from parkd.engine_adapter.llama_server.stream import CompletionEvent, CompletionStream, Ended, Reading, Token
from parkd.errors import ContextOverflow, InvalidRequest, UpstreamFailed, UpstreamTimeout
from parkd.types import SamplingParams, TextForm

SETTLE_S = 120.0
"""Longest wait for a slot to finish its current batch after its answer was abandoned."""
SETTLE_POLL_S = 0.01
_TOO_LONG = "exceed_context_size_error"


@dataclass(frozen=True, slots=True)
class Step:
    """The ids and the text of one event."""

    ids: tuple[int, ...]
    text: str


class Completion:
    """One streamed completion, for one caller: call `read` until it returns None, then `tokens`, and always `close`."""

    def __init__(self, stream: CompletionStream, prompt: Ids, limit: int) -> None:
        """Waits for the first event. `limit` is the requested number of tokens.

        Raises UpstreamFailed, with the stream closed.
        """
        self.prompt = prompt
        self.hidden = False
        """Whether the server has generated ids that it did not send."""
        self.ended = False
        """Whether the server ended the completion itself. The slot then holds exactly its tokens."""
        self.ended_by_token = False
        self.ids: list[int] = []
        """The generated ids up to the first unknown one."""
        self._limit = limit
        self._all_run = False
        self._stream = stream
        try:
            self._first: CompletionEvent | None = stream.next()
        except BaseException:
            stream.close()
            raise
        first = self._first
        self.reused = first.cached if isinstance(first, (Reading, Ended)) else None
        """Tokens of the prompt that the slot already held; None if the first event does not tell."""

    def read(self) -> int | None:
        """Waits for the next batch. Returns how many tokens of the prompt the slot holds then; None if it holds all.
        Raises UpstreamFailed."""
        event = self._next()
        if isinstance(event, Reading):
            if event.processed < event.total:
                return event.processed
            return None
        self._first = event
        return None

    def tokens(self, end_id: int) -> Iterator[Step]:
        """Yields what is generated. `end_id` represents the end token, whichever it was. Raises UpstreamFailed."""
        empty: Token | None = None
        while (event := self._next()) is not None:
            if isinstance(event, Reading):
                continue
            if isinstance(event, Ended):
                yield from self._end(event, empty, end_id)
                return
            if empty is not None:
                yield self._step(empty)
            # An end token arrives like any other, but without text. Only the next event tells whether it was one.
            empty = None if event.text else event
            if empty is None:
                yield self._step(event)

    def drain(self) -> None:
        """Reads to the end, which follows at once if no tokens were requested. Raises UpstreamFailed."""
        for _ in self.tokens(0):
            pass
        self.ids = []

    @property
    def decoded(self) -> Ids:
        """The ids that are certainly in the slot's state, unless the completion fails."""
        known = self.ids if self.hidden or self._all_run else self.ids[:-1]
        return np.concatenate([self.prompt, np.array(known, dtype=np.int64)])

    @property
    def known(self) -> Ids:
        """All known ids, including those that may not be in the state yet."""
        return np.concatenate([self.prompt, np.array(self.ids, dtype=np.int64)])

    def complete_with(self, held: Ids, end_id: int) -> Sequence[int]:
        """Adds the ids that the server did not send, taken from `held`, the ids in the slot. Returns the added ids;
        empty if `held` does not continue the known ids."""
        start = len(self.prompt) + len(self.ids)
        if len(held) < start or not np.array_equal(held[:start], self.known):
            return ()
        rest = [int(token_id) for token_id in held[start:]] + ([end_id] if self.ended_by_token else [])
        self.ids += rest
        self.hidden, self._all_run = False, not self.ended_by_token
        return rest

    def close(self) -> None:
        """Abandons the completion; the server stops at its next batch. If all requested tokens have arrived, first
        waits for the last event."""
        if not self.ended and not self.hidden and len(self.ids) >= self._limit:
            with contextlib.suppress(UpstreamFailed):
                while (event := self._next()) is not None:
                    self.ended = isinstance(event, Ended)
        self._stream.close()

    def _next(self) -> CompletionEvent | None:
        event, self._first = self._first, None
        return self._stream.next() if event is None else event

    def _end(self, event: Ended, empty: Token | None, end_id: int) -> Iterator[Step]:
        self.ended, self.ended_by_token = True, event.stop_type == "eos"
        if not self.ended_by_token:
            if empty is not None:
                yield self._step(empty)
            self.hidden = self.hidden or event.predicted > len(self.ids)
            if event.text:
                yield Step((), event.text)
            return
        self.hidden = self.hidden or event.predicted > len(self.ids) + 1
        if not self.hidden:
            self.ids.append(end_id)
        yield Step(() if self.hidden else (end_id,), event.text)

    def _step(self, token: Token) -> Step:
        """The event as a step. Ids after a missing one are dropped: all are read back once the answer has ended."""
        self.hidden = self.hidden or token.predicted != len(self.ids) + len(token.token_ids)
        if self.hidden:
            return Step((), token.text)
        self.ids += token.token_ids
        return Step(token.token_ids, token.text)


def open_completion(
    client: UpstreamClient,
    slot: Slot,
    prompt: Ids,
    sampling: SamplingParams,
    schema: Mapping[str, Any] | None,
    form: TextForm | None,
    limit: int | None,
    context_tokens: int,
    seed: int,
) -> Completion:
    """Sends a prompt to a slot. `limit` is the maximum number of tokens of the answer. It is also limited to the rest
    of the context, so that the server never shifts its context. Raises InvalidRequest, ContextOverflow,
    UpstreamFailed."""
    room = max(0, context_tokens - len(prompt))
    limit = room if limit is None else min(limit, room)
    body: dict[str, Any] = {
        **base_body(slot.id, prompt, reuse=not slot.is_foreign),
        **sampling_fields(sampling, context_tokens, seed),
        "n_predict": limit,
    }
    if schema == ANY_OBJECT:
        body["grammar"] = OBJECT_GRAMMAR
    elif schema is not None:
        body["json_schema"] = schema
    if form is not None:
        body["grammar"] = grammar_of(form)
    try:
        return Completion(client.complete(body), prompt, limit)
    except UpstreamRefused as refused:
        if refused.kind == _TOO_LONG:
            raise ContextOverflow(len(prompt), 0, context_tokens) from refused
        if (schema is not None or form is not None) and refused.upstream_status == 400:
            raise InvalidRequest(
                f"The llama-server cannot enforce the response format: {refused.text}",
                param="response_format" if form is None else form.param,
            ) from refused
        raise


def settle(
    client: UpstreamClient,
    slot: Slot,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> int | None:
    """Waits until a slot is idle after its answer was abandoned. Returns the number of tokens that it holds; None if
    the server does not tell. Raises UpstreamFailed."""
    until_s = monotonic() + SETTLE_S
    while True:
        state = next((state for state in client.slots() if state.id == slot.id), None)
        if state is None:
            raise UpstreamFailed("The llama-server no longer has the slot that was in use.")
        if not state.is_processing:
            return state.tokens
        if monotonic() > until_s:
            raise UpstreamTimeout("The llama-server does not stop an answer that was abandoned. Look at its log.")
        sleep(SETTLE_POLL_S)
