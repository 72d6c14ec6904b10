"""The torch engine behind the daemon's seam: the only module of parkd that imports `engine`.

Here the engine's errors become the daemon's:

    before serving   UnsupportedModel, ModelLoadError, InvalidSplit, OutOfMemory  ->  ModelError
    in a turn        StageFailed, BadLogits, ContextFull                          ->  EngineFailure, the state is valid
                     a device that stopped answering                              ->  EngineLost
    in a restore     SnapshotError                                                ->  RestoreFailed, the state is empty
    in a template    TemplateRefused                                              ->  InvalidRequest
    in a request     UnknownVector, UnreadableImage                                                ->  InvalidRequest
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine import snapshot
from engine.architectures import architecture_of
from engine.arena import StageArena, WindowRoom
from engine.balance import choose_split
from engine.chat import ChatTemplate as EngineTemplate
from engine.config import EngineConfig
from engine.copies import CaptureInFlight
from engine.decoding import Decoder
from engine.decoding import DraftCounts as DecoderCounts
from engine.draft import DraftHead
from engine.errors import EngineError, SnapshotError, TemplateRefused, UnknownVector, UnreadableImage
from engine.fingerprint import fingerprint
from engine.images import ImageProcessor
from engine.layout import StageStateLayout, build_layout
from engine.loader import LoadConfig, LoadedModel, load_model
from engine.memory import StageNeed, choose_context, free_bytes
from engine.opening import window_room
from engine.pinned import PinnedMemory
from engine.sampling import Sampler
from engine.session import Session
from engine.stages import Stage, place
from engine.steering import SteeringBank, VectorFile, load_vectors
from engine.text import Piece, TextAssembler
from engine.vision import PromptImage, VisionTower
from parkd.engine_adapter.base import (
    Cancel,
    ChatTemplate,
    EngineInfo,
    ImageFacts,
    ImageReader,
    ImageTokens,
    ResponseReader,
    TextPiece,
    Tokenizer,
)
from parkd.errors import EngineFailure, EngineLost, InvalidRequest, ModelError, RestoreFailed
from parkd.types import (
    Checksums,
    DraftCounts,
    ImageSpan,
    SamplingParams,
    StageLayout,
    StateLayout,
    TokenIds,
    TokenMask,
    Transfer,
)

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is done, 0 to 1."""

_LOST_SIGNS = ("device-side assert", "illegal memory access", "unspecified launch failure", "Xid", "uncorrectable ECC")


@dataclass(frozen=True)
class TorchEngineConfig:
    """What to load and how to lay it out."""

    model: str
    """Directory, hub id, GGUF file or `random:NAME`."""
    cache_dir: Path
    """Converted weights and digests of weight files are kept here."""
    name: str | None = None
    """What the model is called; None: after its files."""
    chat_template_file: Path | None = None
    layout: EngineConfig = field(default_factory=EngineConfig)
    reserved_bytes: int = 0
    """Main memory promised to parked conversations: the arenas leave it alone."""
    is_demo_model: bool = False
    control_vectors: tuple[VectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer, both included; None: all but the first."""


class TorchEngine:
    """A `RowEngine` over `engine.session.Session`."""

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        info: EngineInfo,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
        vectors: SteeringBank | None = None,
    ) -> None:
        """`fresh_seed` gives the randomness of answers whose request names no seed. `vectors` are those that requests
        can name; their default scales steer whoever names none."""
        self.info = info
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.template: ChatTemplate = _Template(loaded.template)
        self.images: ImageReader | None = None if loaded.images is None else _Images(loaded.images)
        self._chat = loaded.tokenizer
        self.template_source: str | None = loaded.template.source
        """The chat template's text."""
        self._open: Session | None = session
        self._fresh_seed = fresh_seed
        self._vectors = vectors or SteeringBank()
        self._drafts = DecoderCounts()

    @classmethod
    def load(
        cls,
        config: TorchEngineConfig,
        progress: Progress | None = None,
        *,
        free: Callable[[str], int] = free_bytes,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> TorchEngine:
        """Loads the model and allocates the arenas. `free` tells the bytes a device can still give.

        Raises ModelError, whose message says what to do.
        """
        layout = config.layout
        try:
            loaded = load_model(
                LoadConfig(
                    config.model,
                    config.cache_dir,
                    config.chat_template_file,
                    layout.dtype,
                    draft=layout.guesses > 0,
                    device=layout.devices[0],
                    devices=layout.devices,
                    split=lambda settings, dtype: choose_split(settings, dtype, layout, free),
                ),
                progress,
            )
            text = loaded.text_config
            vectors = load_vectors(
                config.control_vectors,
                int(text.hidden_size),
                int(text.num_hidden_layers),
                config.steered_layers,
            )
            ranges = loaded.ranges
            kv_dtype = layout.kv_dtype or loaded.dtype
            state = build_layout(loaded.config, ranges, kv_dtype, loaded.dtype)
            room = window_room(loaded.config, layout)
            stages = place(loaded.model, ranges, layout.devices)
            tower = None if loaded.images is None else VisionTower(loaded.model, loaded.images, stages[0].device)
            copies = layout.ctx_checkpoints + (layout.guesses if loaded.draft_model is not None else 0)
            context = choose_context(
                [_need(d, s, room, copies) for d, s in zip(layout.devices, state, strict=True)],
                int(text.max_position_embeddings),
                layout.context_tokens,
                reserved_bytes=config.reserved_bytes,
                free=free,
            )
            arenas = [StageArena(s, context, d, window_room=room) for d, s in zip(layout.devices, state, strict=True)]
            session = Session(
                stages,
                arenas,
                layout.batch_tokens,
                text,
                layout.ctx_checkpoints,
                tower,
                draft_model=loaded.draft_model,
                draft_tokens=layout.guesses,
                peer_access=layout.peer_access,
            )
            session.use_kernels(progress)
        except EngineError as error:
            raise ModelError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"The weights do not fit the devices {','.join(layout.devices)}: {error} "
                f"Name more devices with --devices, or use a smaller model."
            ) from error
        info = EngineInfo(
            model_name=config.name or loaded.name,
            architecture=architecture_of(loaded.config),
            fingerprint=fingerprint(loaded.weights_digest, loaded.config.to_dict(), loaded.dtype, kv_dtype),
            context_tokens=context,
            vocab_size=int(text.vocab_size),
            end_token_ids=loaded.end_token_ids,
            layout=_state_layout(state, session.checksum.name),
            devices=layout.devices,
            weights_bytes=_weights_bytes(stages, tower, session.draft),
            arena_bytes=sum(arena.nbytes for arena in arenas),
            is_demo_model=config.is_demo_model,
            ctx_checkpoints=layout.ctx_checkpoints if session.fixed_state.exists else 0,
        )
        return cls(loaded, session, info, fresh_seed=fresh_seed, vectors=vectors)

    @property
    def images_encoded(self) -> int:
        """Pictures that went through the vision tower, over the engine's life."""
        return 0 if self._session.vision is None else self._session.vision.encoded

    def tokenizer_json(self) -> str:
        """The text of the model's `tokenizer.json`."""
        return self._chat.to_json()

    @property
    def response_reader(self) -> Callable[[str, Sequence[Mapping[str, Any]]], ResponseReader] | None:
        """From a prompt's end and the tools to what reads the answer; None if the model's files do not say how."""
        return None if self._chat.responses is None else self._chat.responses.reader

    def host_memory_hooks(self) -> PinnedMemory | None:
        """What a pool of parked rows should tell of its memory, for copies at full speed; None without cards."""
        uses_cards = any(torch.device(device).type == "cuda" for device in self.info.devices)
        return PinnedMemory() if uses_cards else None

    @property
    def _session(self) -> Session:
        if self._open is None:
            raise EngineFailure("The engine is closed.")
        return self._open

    @property
    def position(self) -> int:
        return self._session.position

    def reset(self) -> None:
        self._session.reset()

    def truncate(self, position: int) -> None:
        self._session.truncate(position)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self._session.checkpoints

    @property
    def rewind_floor(self) -> int:
        return self._session.rewind_floor

    def checkpoint(self) -> None:
        self._session.checkpoint()

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),
    ) -> int:
        with _translated():
            return self._session.extend(
                token_ids,
                cancel=cancel,
                on_chunk=on_chunk,
                checkpoint_at=checkpoint_at,
                images=[PromptImage(image.start, image.stop, image.data) for image in images],
            )

    def generate(
        self,
        last_token_id: int,
        sampling: SamplingParams,
        *,
        history: TokenIds,
        mask: TokenMask | None = None,
    ) -> Iterator[Sequence[int]]:
        sampler = Sampler(sampling, self.info.vocab_size, history, fresh_seed=self._fresh_seed())
        decoder = Decoder(self._session, sampler, mask=mask, end_token_ids=self.info.end_token_ids)
        self._drafts = decoder.counts
        with closing(decoder.tokens(last_token_id)) as tokens:
            while True:
                with _translated():
                    token = next(tokens, None)
                if token is None:
                    return
                yield (token,)

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts(self._drafts.drafted, self._drafts.accepted)

    def steering_digest(self, scales: Mapping[str, float] | None) -> bytes:
        with _known_vectors():
            return self._vectors.digest(scales)

    def steer(self, scales: Mapping[str, float] | None) -> bytes:
        # A set is often the same for a whole conversation: its sums are made only when it changes.
        if self.steering_digest(scales) != self._session.steering_digest:
            with _translated():
                self._session.steer(self._vectors.select(scales))
        return self._session.steering_digest

    def text_stream(self, stop: Sequence[str]) -> _TextStream:
        return _TextStream(self._chat.text(stop))

    def capture(self, transfer: Transfer) -> Checksums:
        with _translated():
            sums = snapshot.capture(self._session, transfer)
        return Checksums(sums.rows, sums.fixed)

    def start_capture(self, transfer: Transfer) -> _CaptureInFlight | None:
        with _translated():
            capture = snapshot.start_capture(self._session, transfer)
        return None if capture is None else _CaptureInFlight(capture)

    def restore(self, transfer: Transfer) -> None:
        try:
            snapshot.restore(self._session, transfer)
        except SnapshotError as error:
            # A mismatch leaves the rows alone, but who asked for it must be able to read cold from an empty engine.
            self._session.reset()
            if _is_lost(error):
                raise EngineLost(_lost_message(error)) from error
            raise RestoreFailed(str(error)) from error
        except BaseException:
            self._session.reset()
            raise

    def close(self) -> None:
        """Gives weights and arenas back. The engine is of no use afterwards."""
        self._open = None


class _CaptureInFlight:
    """The engine's, in the daemon's words."""

    def __init__(self, capture: CaptureInFlight) -> None:
        self._capture = capture

    def wait(self) -> Checksums:
        with _translated():
            return Checksums(*self._capture.wait())


class _Template:
    """The engine's template, refusing in the daemon's words."""

    def __init__(self, template: EngineTemplate) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return self._template.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)
        except TemplateRefused as error:
            raise InvalidRequest(str(error), param="messages") from error


class _Images:
    """The engine's way with pictures, refusing in the daemon's words."""

    def __init__(self, processor: ImageProcessor) -> None:
        tokens = processor.tokens
        self._processor = processor
        self.tokens = ImageTokens(tokens.placeholder, tokens.wrapped, tokens.token_id)
        self.sees_itself = processor.family.sees_itself

    def facts(self, data: bytes) -> ImageFacts:
        try:
            facts = self._processor.facts(data)
        except UnreadableImage as error:
            raise InvalidRequest(f"The image cannot be read: {error}.") from error
        return ImageFacts(facts.digest, facts.tokens)


class _TextStream:
    """One answer's text."""

    def __init__(self, assembler: TextAssembler) -> None:
        self._assembler = assembler

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        return _piece(self._assembler.push(token_ids))

    def flush(self) -> TextPiece:
        return _piece(self._assembler.flush())


def _piece(piece: Piece) -> TextPiece:
    return TextPiece(piece.text, piece.stop_string)


def _state_layout(stages: Sequence[StageStateLayout], checksum: str) -> StateLayout:
    return StateLayout(
        tuple(StageLayout(s.first_layer, s.end_layer, s.row_bytes, s.fixed_bytes, s.digest) for s in stages), checksum
    )


def _need(device: str, layout: StageStateLayout, room: WindowRoom, copies: int) -> StageNeed:
    """What a stage asks of its device beside the rows: what is live, and the copies of it that are kept there:
    checkpoints, and the states that guesses are taken back to."""
    fixed_bytes = layout.fixed_bytes * (1 + copies) + layout.window_bytes(room.tokens)
    return StageNeed(device, layout.row_bytes + math.ceil(layout.index_bytes_a_token), fixed_bytes)


def _weights_bytes(stages: Sequence[Stage], tower: VisionTower | None, draft: DraftHead | None) -> int:
    """Bytes of all weights; what stages on one device share counts once."""
    modules = [module for stage in stages for module in (stage.inner, stage.head) if module is not None]
    modules += [] if tower is None else [tower.module]
    modules += [] if draft is None else [draft.model]
    tensors = [parameter for module in modules for parameter in module.parameters()]
    return sum({(str(t.device), t.data_ptr()): t.numel() * t.element_size() for t in tensors}.values())


@contextmanager
def _known_vectors() -> Iterator[None]:
    try:
        yield
    except UnknownVector as error:
        raise InvalidRequest(str(error), param="steering") from error


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _is_lost(error):
            raise EngineLost(_lost_message(error)) from error
        if not isinstance(error, EngineError):
            raise
        if _is_out_of_memory(error):
            torch.cuda.empty_cache()
            raise EngineFailure(
                f"The device has too little free memory for this turn: {error}. Start with a smaller --batch-size or "
                f"--ctx-size, or send a shorter prompt."
            ) from error
        raise EngineFailure(f"The engine could not finish this turn: {error}. Send the request again.") from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error.__cause__, torch.OutOfMemoryError)


def _lost_message(error: BaseException) -> str:
    return f"The device stopped working and parkd must be started again: {error}"


def _is_lost(error: BaseException) -> bool:
    """Whether the device's context is poisoned: every later call on it would fail too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.AcceleratorError) and not isinstance(cause, torch.OutOfMemoryError):
            return True
        if any(sign in str(cause) for sign in _LOST_SIGNS):
            return True
        cause = cause.__cause__
    return False
