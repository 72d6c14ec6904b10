"""An engine of opaque state in files: a llama-server in another process.

    prompt ---- POST /completion (ids, id_slot, cache_prompt, streamed) ----> Reading ... Token ... Ended
    state  ---- POST /slots/N?action=save ----> DIR/parkd-*.slot --rename--> the store's file      (restore: link back)

The server compares each prompt token by token with the content of its slot, and reports how many tokens it reused. So a
wrong belief about a slot cannot change an answer, only what is reported and parked. The reported number is compared
with the expected one on each turn.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parkd.config import UpstreamConfig
from parkd.engine_adapter.base import Cancel, ChatTemplate, ImageReader, OneSeatEngine, Tokenizer, check_adapters
from parkd.engine_adapter.llama_server.client import UpstreamRefused
from parkd.engine_adapter.llama_server.completion import Completion, open_completion, settle
from parkd.engine_adapter.llama_server.parking import LOST, SlotParking
from parkd.engine_adapter.llama_server.sampling import check_enforceable
from parkd.engine_adapter.llama_server.slots import Slot, SlotTable
from parkd.engine_adapter.llama_server.start import Upstream, connect
from parkd.engine_adapter.llama_server.states import SlotFiles
from parkd.engine_adapter.llama_server.template import HereTemplate, UpstreamTemplate
from parkd.engine_adapter.llama_server.text import UpstreamText, UpstreamTokenizer, first_tokens
from parkd.engine_adapter.llama_server.watch import RunWatch
from parkd.engine_adapter.llama_server.weights import Progress
from parkd.errors import (
    EngineFailure,
    InvalidRequest,
    ParkdError,
    RestoreFailed,
    UpstreamDown,
    UpstreamFailed,
    UpstreamTimeout,
)
from parkd.state import Checksums, StateSizes, Transfer
from parkd.types import ImageSpan, SamplingParams, TextForm, TokenIds, TokenMask, TurnRequest

log = logging.getLogger(__name__)


class LlamaServerEngine(OneSeatEngine):
    """Live state is in the server's slots. The daemon's live conversation is in the current slot."""

    def __init__(
        self,
        upstream: Upstream,
        config: UpstreamConfig,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(32),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = upstream.info
        self.tokenizer: Tokenizer = UpstreamTokenizer(upstream.client, upstream.special_tokens)
        here = HereTemplate.of(upstream.template_source, upstream.template_names)
        self.template: UpstreamTemplate = UpstreamTemplate(upstream.client, upstream.first_text, here)
        self.images: ImageReader | None = None
        self.template_source: str | None = upstream.template_source
        self.response_reader = None
        """None: a llama-server provides the model's chat template, but no response template."""
        self.notes = upstream.notes
        """Shown to the operator at start."""
        self._client = upstream.client
        self._files = SlotFiles(upstream.client, config.slot_dir)
        self._parking = SlotParking(upstream, self._files)
        self.watch = RunWatch(upstream, config, monotonic)
        self._table = SlotTable(upstream.incarnation.slots)
        self._completion: Completion | None = None
        self._text = ""
        self._fresh_seed = fresh_seed

    @classmethod
    def load(cls, config: UpstreamConfig, progress: Progress | None = None) -> LlamaServerEngine:
        """Connects to a running server. Raises ModelError, whose message says what to do."""
        return cls(connect(config, progress), config)

    def host_memory_hooks(self) -> None:
        """None: no state passes through parkd's memory."""

    @property
    def slot(self) -> Slot:
        """The slot of the live conversation."""
        return self._table.current

    @property
    def position(self) -> int:
        return self.slot.position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Empty: the server keeps its own checkpoints, and puts them into its files. parkd cannot see them."""
        return ()

    @property
    def rewind_floor(self) -> int:
        """0: the server rewinds as far as it can and reads the rest again. `begin` returns how far it did."""
        return 0

    def checkpoint(self) -> None:
        """Does nothing: the server takes its own checkpoints."""

    def reset(self) -> None:
        self._drop()
        self._table.take()

    def truncate(self, position: int) -> None:
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot truncate {self.position} tokens to {position}")
        self._drop()
        if position == 0:
            self._table.take()
        elif position < self.position:
            self.slot.holds(self.slot.ids[:position], exact=False)

    @property
    def is_awake(self) -> bool:
        return self.watch.is_fresh

    def awake(self) -> None:
        """Checks whether the server was restarted; if so, nothing is live. Raises UpstreamFailed, and EngineLost if it
        now serves another model, adapter or context."""
        if not self.is_awake:
            self._look()

    def begin(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        images: Sequence[ImageSpan] = (),
        mask: TokenMask | None = None,
        schema: Mapping[str, Any] | None = None,
        form: TextForm | None = None,
        limit: int | None = None,
        request: TurnRequest | None = None,  # noqa: ARG002 - what it asks is in the others
        cancel: Cancel | None = None,  # noqa: ARG002 - the server answers at once
    ) -> int:
        """Sends the whole prompt. Returns the number of its tokens that the server reuses, at most `position`.

        `extend` and `generate` then follow the answer. Raises EngineFailure and InvalidRequest, after which nothing is
        live.
        """
        assert mask is None, "the server enforces schemas itself"
        assert not images, "`self.images` is None"
        self._drop()
        slot, ids = self.slot, np.array(token_ids, dtype=np.int64)
        promised = slot.position
        assert promised < len(ids)
        assert np.array_equal(ids[:promised], slot.ids)
        if limit == 0:  # no logits are needed, so the last token is not read
            ids = ids[:-1]
            if promised == len(ids):
                return promised
        try:
            completion = open_completion(
                self._client, slot, ids, sampling, schema, form, limit, self.info.context_tokens, self._fresh_seed()
            )
        except ParkdError:
            self._forget(slot)
            raise
        self._completion = completion
        self._table.select(slot)
        reused = promised if completion.reused is None else min(promised, completion.reused)
        slot.holds(ids[:reused], exact=False)
        if reused < min(promised, len(ids) - 1):
            log.warning("the llama-server's slot %d held %d of %d expected tokens", slot.id, reused, promised)
            self.watch.doubt()
        return reused

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),  # noqa: ARG002 - the server takes its own checkpoints
    ) -> int:
        ids = np.concatenate([self.slot.ids, np.asarray(token_ids, dtype=np.int64)])
        if self._completion is None and len(token_ids):  # `begin` was not called for these tokens
            self.begin(np.append(ids, ids[-1:]), SamplingParams(), limit=0)
        completion, slot = self._completion, self.slot
        if completion is None:
            return self.position
        with self._following(completion):
            while not cancel.is_set() and (at := completion.read()) is not None:
                slot.holds(ids[: min(at, len(ids))], exact=False)
                if on_chunk is not None and at > 0:
                    on_chunk(self.position)
            if cancel.is_set():
                self._drop()
                return self.position
            slot.holds(ids, exact=False)
            if len(completion.prompt) == len(ids):
                completion.drain()
                self._drop()
        return self.position

    def generate(self) -> Iterator[Sequence[int]]:
        completion = self._completion
        assert completion is not None, "`begin` comes before `generate`"
        [end_id] = self.info.end_token_ids
        try:
            with self._following(completion):
                for step in completion.tokens(end_id):
                    self._text += step.text
                    yield step.ids
                if completion.hidden:
                    yield self._read_back(completion, end_id)
        finally:
            if self._completion is completion:
                self._drop()

    def check(self, request: TurnRequest, *, thinks: bool) -> None:
        check_enforceable(request, thinks=thinks)

    def template_within(self, namespace: str) -> ChatTemplate:  # noqa: ARG002 - each is apart
        return self.template.apart()

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @property
    def opening_ids(self) -> Sequence[int]:
        return first_tokens(self._client)

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        check_adapters(self.adapters, adapters)
        if scales:
            raise InvalidRequest(
                "A llama-server's control vectors are set when it is started; a request cannot name any.",
                param="steering",
            )
        return b""

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        return self.steering_digest(scales, adapters)

    def text_stream(self) -> UpstreamText:
        return UpstreamText(self._taken_text)

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        assert not checkpoints
        self._drop()
        self._look()
        if self.position == 0:
            raise EngineFailure(LOST)
        return self._parking.sizes(self.slot)

    def forget_sizes(self) -> None:
        self._parking.let_go()

    def capture(self, transfer: Transfer) -> Checksums:
        self._look()
        return self._parking.capture(self.slot, transfer)

    def restore(self, transfer: Transfer) -> None:
        """Besides RestoreFailed, raises UpstreamDown, after which the parked state is still valid and is kept."""
        try:
            self._drop()
            self._parking.check(transfer)
            self._look()
            self._parking.restore(self._table, transfer)
        except UpstreamDown:
            self._forget(self.slot)
            raise
        except (UpstreamFailed, OSError) as error:
            self.slot.forget()
            raise RestoreFailed(self._why_not_restored(error)) from error
        except BaseException:
            self.slot.forget()
            raise

    def close(self) -> None:
        self._drop()
        self._client.close()

    def _why_not_restored(self, error: UpstreamFailed | OSError) -> str:
        if isinstance(error, OSError):
            return f"its file cannot be read: {error.strerror}"
        if not isinstance(error, UpstreamRefused):
            return error.message
        now, before = self.watch.run.slots, self.watch.slots_before
        if now != before:
            return (
                f"The llama-server refused a file that it saved with -np {before}: it now has -np {now}, and such "
                f"files fit no other number. With --kv-unified they would."
            )
        return f"{error.message} Was it restarted with another KV type?" if self.watch.restarts else error.message

    def _look(self) -> None:
        """Forgets all slots if the server was restarted. Raises EngineLost, UpstreamFailed."""
        if self.watch.look():
            self._drop()
            self._parking.learn_sizes()
            self._table = SlotTable(self.watch.run.slots)

    @contextmanager
    def _following(self, completion: Completion) -> Iterator[None]:
        """Handles errors of the completion. After an error that the server reported, the slot keeps what it last
        reported. If the server timed out or is gone, the slot is forgotten."""
        try:
            yield
        except (UpstreamTimeout, UpstreamDown):
            completion.close()
            self._forget(self.slot)
            raise
        except ParkdError:
            self.watch.doubt()
            self._drop()
            raise

    def _drop(self) -> None:
        """Abandons the answer, if there is one, and finds out what its slot now holds. Never raises: if that cannot be
        found out, the slot is forgotten."""
        self._parking.let_go()
        completion, self._completion = self._completion, None
        if completion is None:
            return
        completion.close()
        self._text = ""
        slot = self.slot
        if completion.ended:
            slot.holds(completion.decoded, exact=not completion.hidden)
            self._ended_well(slot)
            return
        try:
            held = settle(self._client, slot)
        except ParkdError as error:
            log.warning(
                "the content of the llama-server's slot %d is unknown, so it is not reused: %s", slot.id, error.message
            )
            self._forget(slot)
            return
        known = completion.known
        held = slot.position if held is None else held
        slot.holds(known[:held], exact=held <= len(known))

    def _ended_well(self, slot: Slot) -> None:
        """Called after a complete answer. If the server was restarted before it, only this slot holds known state."""
        if not self.watch.in_doubt:
            self.watch.heard()
            return
        try:
            if self.watch.look():
                self._parking.learn_sizes()
                self._table = SlotTable(self.watch.run.slots, slot)
        except ParkdError as error:
            log.warning("checking the llama-server for a restart failed, the next turn tries again: %s", error.message)

    def _forget(self, slot: Slot) -> None:
        self._completion = None
        slot.forget()
        self.watch.doubt()

    def _read_back(self, completion: Completion, end_id: int) -> Sequence[int]:
        """The ids that the server did not send, because the text of their tokens was not whole characters. Empty if
        they cannot be read back."""
        try:
            held = self._files.ids(self.slot)
        except (ParkdError, OSError) as error:
            log.warning("some ids of an answer could not be read back, so it is parked without its end: %s", error)
            return ()
        return () if held is None else completion.complete_with(held, end_id)

    def _taken_text(self) -> str:
        text, self._text = self._text, ""
        return text
