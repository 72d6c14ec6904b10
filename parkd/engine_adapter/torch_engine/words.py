"""Translates the torch engine's errors into parkd's, and wraps the parts of the engine that raise them.

before serving   UnsupportedModel, ModelLoadError, InvalidSplit, OutOfMemory  ->  ModelError (`torch_loading`)
in a turn        StageFailed, BadLogits, ContextFull                          ->  EngineFailure, the state is valid
                 a device that stopped answering                              ->  EngineLost
in a restore     SnapshotError                                                ->  RestoreFailed, the state is empty
in a template    TemplateRefused                                              ->  InvalidRequest
in a request     UnknownVector, UnreadableImage                               ->  InvalidRequest
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from parkd_engine.errors import BadLogits, EngineError, TemplateRefused, UnknownVector, UnreadableImage
from parkd_engine.moves.capture_in_flight import CaptureInFlight
from parkd_engine.vision.images import ImageProcessor
from parkd_engine.words.chat import ChatTemplate as EngineTemplate

from parkd.engine_adapter.base import ImageFacts, ImageTokens, Rendered
from parkd.errors import EngineFailure, EngineLost, InvalidRequest, LogitsNotFinite
from parkd.state import Checksums

_LOST_SIGNS = ("device-side assert", "illegal memory access", "unspecified launch failure", "Xid", "uncorrectable ECC")


class TranslatedCapture:
    """The engine's capture, with errors translated."""

    def __init__(self, capture: CaptureInFlight) -> None:
        self._capture = capture

    def wait(self) -> Checksums:
        with translated():
            return self._capture.wait()


class TranslatedTemplate:
    """The engine's template, with errors translated."""

    def __init__(self, template: EngineTemplate) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        try:
            return Rendered(self._template.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt))
        except TemplateRefused as error:
            raise InvalidRequest(str(error), param="messages") from error


class TranslatedImages:
    """The engine's image reader, with errors translated."""

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


@contextmanager
def known_vectors() -> Iterator[None]:
    """Translates an unknown control vector into InvalidRequest."""
    try:
        yield
    except UnknownVector as error:
        raise InvalidRequest(str(error), param="steering") from error


@contextmanager
def translated() -> Iterator[None]:
    """Translates errors of a turn to EngineLost and EngineFailure. Errors that are not the engine's pass through."""
    try:
        yield
    except Exception as error:
        if is_lost(error):
            raise EngineLost(lost_message(error)) from error
        if not isinstance(error, EngineError):
            raise
        if _is_out_of_memory(error):
            torch.cuda.empty_cache()
            raise EngineFailure(
                f"The device has too little free memory for this turn: {error}. Start with a smaller --batch-size or "
                f"--ctx-size, or send a shorter prompt."
            ) from error
        kind = LogitsNotFinite if isinstance(error, BadLogits) else EngineFailure
        raise kind(
            f"The engine could not finish this turn: {str(error).removesuffix('.')}. Send the request again."
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error.__cause__, torch.OutOfMemoryError)


def lost_message(error: BaseException) -> str:
    """A message that says what to do about a lost device."""
    return f"The device stopped working and parkd must be restarted: {error}"


def is_lost(error: BaseException) -> bool:
    """Whether the device's context is poisoned, so that every later call on it would fail too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.AcceleratorError) and not isinstance(cause, torch.OutOfMemoryError):
            return True
        if any(sign in str(cause) for sign in _LOST_SIGNS):
            return True
        cause = cause.__cause__
    return False
