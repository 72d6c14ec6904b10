"""The torch engine: a session of `engine` behind the protocols of `parkd.engine_adapter.base`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from parkd_engine.decoding import Decoder
from parkd_engine.failures import noticing_loss
from parkd_engine.loading.loader import LoadedModel
from parkd_engine.memory import free_bytes
from parkd_engine.moves import snapshot
from parkd_engine.moves.capture_in_flight import CaptureInFlight
from parkd_engine.moves.copy_speed import copy_bytes_per_s
from parkd_engine.session import Session
from parkd_engine.state_parts import state_parts
from parkd_engine.together import Together
from parkd_engine.vision.tower import PromptImage
from parkd_engine.words.sampling import TensorSampler

from parkd.config import ModelConfig
from parkd.engine_adapter.base import (
    Cancel,
    ChatTemplate,
    Engine,
    EngineInfo,
    ImageReader,
    ResponseReader,
    ScoredToken,
    Seat,
    TextStream,
    Tokenizer,
    check_adapters,
)
from parkd.engine_adapter.pinned import PinnedMemory
from parkd.engine_adapter.rendered import RenderedTemplate
from parkd.engine_adapter.torch_engine.loading import Progress, load_parts
from parkd.engine_adapter.torch_engine.page_locks import page_locks
from parkd.errors import EngineFailure
from parkd.state import Checksums, DraftCounts, Transfer
from parkd.types import TokenIds
from parkd.words.steering import SteeringBank


class TorchSeat(Seat):
    """A seat over a `parkd_engine.session.Session`. What is not of one conversation is shared with the other seats."""

    def __init__(
        self,
        session: Session,
        info: EngineInfo,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
        vectors: SteeringBank | None = None,
        together: Together | None = None,
    ) -> None:
        """`together` makes the steps of all seats, if they are recorded there. `fresh_seed` returns the seed for
        requests without one. `vectors` are the control vectors that requests can choose; a request that chooses none is
        steered by their default scales."""
        self.info = info
        self._open: Session | None = session
        self._fresh_seed = fresh_seed
        self._vectors = vectors or SteeringBank()
        self._together = together
        self._decoder: Decoder | None = None
        """Of the last answer."""

    @property
    def session(self) -> Session:
        """The session in which it computes. Raises EngineFailure if it was closed."""
        if self._open is None:
            raise EngineFailure("The engine is closed.")
        return self._open

    @property
    def is_held(self) -> bool:  # where it lies is the session's, which has the rows
        return self._open is not None and self._open.is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        if self._open is not None:
            self._open.is_held = is_held

    @property
    def position(self) -> int:
        return self.session.position

    def reset(self) -> None:
        self.session.reset()

    def truncate(self, position: int) -> None:
        self.session.truncate(position)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self.session.checkpoints

    @property
    def rewind_floor(self) -> int:
        return self.session.rewind_floor

    def checkpoint(self) -> None:
        self.session.checkpoint()

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
    ) -> int:
        with noticing_loss():
            return self.session.extend(
                token_ids,
                cancel=cancel,
                on_chunk=on_chunk,
                checkpoint_at=checkpoint_at,
                images=[PromptImage(image.start, image.stop, image.data) for image in self.begun_images],
            )

    def generate(self) -> Iterator[Sequence[int]]:
        begun = self.begun
        sampler = TensorSampler(begun.sampling, self.info.vocab_size, begun.token_ids, fresh_seed=self._fresh_seed())
        self._decoder = decoder = Decoder(
            self.session,
            sampler,
            mask=begun.mask,
            end_token_ids=self.info.end_token_ids,
            top_logprobs=begun.sampling.top_logprobs,
            step=Session.step if self._together is None else self._together.step_alone,
        )
        return _steps(decoder, int(begun.token_ids[-1]))

    def set_aside(self) -> Callable[[Seat], None]:
        put_prompt_back, decoder = super().set_aside(), self._decoder
        # It leaves with its turn: who is set aside here next, while it reads, has no answer to take along.
        self._decoder = None

        def put_back(seat: Seat) -> None:
            assert isinstance(seat, TorchSeat)
            put_prompt_back(seat)
            seat._decoder = decoder
            if decoder is not None:
                decoder.move_to(seat.session)

        return put_back

    @property
    def next_step(self) -> int | None:
        """The token that the answer's next step reads, if it can be made ahead; None: it is made alone."""
        return None if self._decoder is None else self._decoder.steps_next

    def stepped_ahead(self, logits: torch.Tensor) -> None:
        """The session has made the answer's `next_step`; these are its logits."""
        assert self._decoder is not None
        self._decoder.stepped_ahead(logits)

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts() if self._decoder is None else self._decoder.counts

    @property
    def logprobs(self) -> Sequence[ScoredToken]:
        return () if self._decoder is None else self._decoder.logprobs

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        check_adapters((), adapters)
        return self._vectors.digest(scales)

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        check_adapters((), adapters)
        # The set is often the same for a whole conversation, so the summed directions are computed only on a change.
        if self.steering_digest(scales) != self.session.steering_digest:
            with noticing_loss():
                self.session.steer(self._vectors.select(scales))
        return self.session.steering_digest

    def state_parts(self) -> Mapping[str, bytes]:
        return state_parts(self.session)

    def capture(self, transfer: Transfer) -> Checksums:
        with noticing_loss():
            return snapshot.capture(self.session, transfer)

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:
        with noticing_loss():
            return snapshot.start_capture(self.session, transfer)

    def restore(self, transfer: Transfer) -> None:
        with self.emptied_by_failures():  # A mismatch leaves rows in place.
            snapshot.restore(self.session, transfer)

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        with self.emptied_by_failures(), noticing_loss():
            snapshot.restore_and_read(self.session, transfer, token_ids, checkpoint_at=checkpoint_at)


class TorchEngine(TorchSeat, Engine):
    """An engine of rows. It is its own first seat, as an engine with one seat is."""

    def __init__(
        self,
        loaded: LoadedModel,
        sessions: Session | Sequence[Session],
        info: EngineInfo,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
        vectors: SteeringBank | None = None,
        progress: Progress = lambda _what, _share: None,
    ) -> None:
        """`sessions` has one for each seat. The other arguments are those of `TorchSeat`."""
        first, *others = [sessions] if isinstance(sessions, Session) else sessions
        together = None
        if others:
            # Also for one seat alone, so that an answer has the same bits whoever is beside it.
            joint = Together((first, *others))
            together = joint if joint.record() else None
        shared = {"fresh_seed": fresh_seed, "vectors": vectors, "together": together}
        super().__init__(first, info, **shared)  # type: ignore[arg-type]
        self._beside = tuple(TorchSeat(each, info, **shared) for each in others)  # type: ignore[arg-type]
        self._chat = loaded.tokenizer
        self._progress = progress
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.template: ChatTemplate = RenderedTemplate(loaded.template)
        self.images: ImageReader | None = loaded.images
        self.template_source: str | None = loaded.template.source
        """The chat template's text."""

    @property
    def seats(self) -> Sequence[Seat]:
        return (self, *self._beside)

    @property
    def turns_at_once(self) -> int:
        return len(self.seats)

    def step_ahead(self, seats: Sequence[Seat]) -> None:
        if self._together is None:
            return  # one after the other is as fast, and has the bits of each
        all_seats = (self, *self._beside)
        tokens = {number: each.next_step for number, each in enumerate(all_seats) if each in seats}
        ready = {number: token for number, token in tokens.items() if token is not None}
        if len(ready) < 2:
            return
        with noticing_loss():
            scores = self._together.step(tuple(ready), tuple(ready.values()))
        for number, logits in zip(ready, scores, strict=True):
            all_seats[number].stepped_ahead(logits)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        progress: Progress | None = None,
        *,
        free: Callable[[str], int] = free_bytes,
        reserved: Callable[[], int] = lambda: 0,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> TorchEngine:
        """Loads the model and allocates the arenas as `config.layout` says. `free` returns the free bytes of a device;
        `reserved`, asked after it, the bytes of main memory that parked conversations may take.

        Raises ModelError, whose message says what to do.
        """
        parts = load_parts(config, progress, free, reserved)
        told = progress or (lambda _what, _share: None)
        return cls(
            parts.loaded, parts.sessions, parts.info, fresh_seed=fresh_seed, vectors=parts.vectors, progress=told
        )

    @property
    def images_encoded(self) -> int:
        """The number of images encoded by the vision tower since the engine was loaded."""
        return 0 if self.session.vision is None else self.session.vision.encoded

    def tokenizer_json(self) -> str:
        """The text of the model's `tokenizer.json`."""
        return self._chat.to_json()

    @property
    def response_reader(self) -> Callable[[str, Sequence[Mapping[str, Any]]], ResponseReader] | None:
        """(end of the prompt, tools) -> a reader for the answer; None if the model has no response template."""
        return None if self._chat.responses is None else self._chat.responses.reader

    def copy_bytes_per_s(self) -> float | None:
        return copy_bytes_per_s(self.info.devices)

    def host_memory_hooks(self) -> PinnedMemory | None:
        """Hooks that page-lock the memory of the pool of parked rows, for fast copies; None without cards."""
        uses_cards = any(torch.device(device).type == "cuda" for device in self.info.devices)
        return page_locks(self._progress) if uses_cards else None

    def piece(self, token_id: int) -> bytes:
        return self._chat.piece(token_id)

    @property
    def opening_ids(self) -> Sequence[int]:
        return self._chat.opening_ids

    def text_stream(self) -> TextStream:
        return self._chat.text()

    def close(self) -> None:
        """Frees weights and arenas. The engine must not be used afterwards."""
        for seat in (self, *self._beside):
            seat._open = seat._decoder = None


def _steps(decoder: Decoder, last_token_id: int) -> Iterator[Sequence[int]]:
    with closing(decoder.tokens(last_token_id)) as tokens:
        while True:
            with noticing_loss():
                token = next(tokens, None)
            if token is None:
                return
            yield (token,)
