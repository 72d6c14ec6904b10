"""Every error the engine raises on purpose.

    EngineError
    ├── ModelLoadError        files that are missing, damaged, refused, or too large for the machine
    ├── UnsupportedModel      an architecture, a layer kind or an attention argument the engine does not honour
    ├── InvalidSplit          layers cannot be divided over the stages as asked
    ├── OutOfMemory           an arena does not fit its device
    ├── ContextFull           more tokens than the arenas have rows
    ├── StageFailed           a forward or a capture broke; the session's position is valid
    ├── TemplateRefused       the chat template does not take these messages
    ├── UnreadableImage       a picture that cannot be unpacked, or is too large
    ├── UnknownVector         steering by a control vector that was not loaded
    ├── BadLogits             the model's numbers leave nothing to sample from
    └── SnapshotError
        ├── SnapshotMismatch  a snapshot does not belong here; found before anything was written
        └── SnapshotDamaged   a snapshot broke while it was restored; the session was reset

Argument mistakes of the calling program are `ValueError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """Base of all; the message is for people."""


class ModelLoadError(EngineError):
    """The message says what to do."""


class UnsupportedModel(EngineError):
    """The model needs something the engine does not do. Raised before weights are read wherever possible."""


class InvalidSplit(EngineError):
    """A layer split that the model or the devices do not allow."""


class OutOfMemory(EngineError):
    """An arena could not be allocated."""

    def __init__(self, device: str, needed_bytes: int, context_tokens: int, fitting_tokens: int) -> None:
        mib = needed_bytes / 2**20
        super().__init__(
            f"{device} cannot hold {mib:,.0f} MiB for a context of {context_tokens} tokens. About {fitting_tokens} "
            f"tokens would fit; lower the context size to that or less."
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.context_tokens = context_tokens
        self.fitting_tokens = fitting_tokens
        """Tokens for which an arena of this layout would fit the device now."""


class ContextFull(EngineError):
    """The tokens asked for do not fit the context."""

    def __init__(self, position: int, tokens: int, context_tokens: int) -> None:
        super().__init__(f"{tokens} tokens at position {position} do not fit a context of {context_tokens} tokens")


class StageFailed(EngineError):
    """One stage could not finish. Rows up to the session's position stay valid."""

    def __init__(self, stage: int, doing: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage} failed in {doing}: {type(cause).__name__}: {cause}")
        self.stage = stage


class UnreadableImage(EngineError):
    """The message continues `The image cannot be read:`."""


class TemplateRefused(EngineError):
    """The message carries the template's own words."""


class BadLogits(EngineError):
    """No token has a finite score: the weights are broken, or a mask allows nothing."""


class UnknownVector(EngineError):
    """A request names a control vector that was not loaded."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        loaded = f"These are: {', '.join(known)}." if known else "None is loaded: start with --control-vector."
        super().__init__(f"There is no control vector {name!r}. {loaded}")


class SnapshotError(EngineError):
    """A snapshot that cannot become the live state."""


class SnapshotMismatch(SnapshotError):
    """Wrong layout, stages, ranges or sizes. Nothing was written; the live state is as before."""


class SnapshotDamaged(SnapshotError):
    """A copy failed or a checksum differs. Every stage was reset; the session's position is 0."""
