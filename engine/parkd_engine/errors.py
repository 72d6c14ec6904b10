"""Every error the engine raises on purpose.

    EngineError
    ├── ModelLoadError        files that are missing, damaged, refused, or too large for the machine
    ├── UnsupportedModel      an architecture, a kind of layer or an attention argument that is not supported
    ├── InvalidSplit          the layers cannot be divided over the stages as requested
    ├── OutOfMemory           an arena does not fit its device
    ├── ContextFull           more tokens than the arenas have rows
    ├── StageFailed           a forward pass or a capture failed; the session's position is valid
    ├── TemplateRefused       the chat template refuses these messages
    ├── UnreadableImage       an image that cannot be decoded, or is too large
    ├── UnknownVector         steering by a control vector that was not loaded
    ├── BadLogits             no token can be sampled from the model's logits
    └── SnapshotError
        ├── SnapshotMismatch  a snapshot does not fit this session; found before anything was written
        └── SnapshotDamaged   a restore failed after it began to write; the session was reset

Wrong arguments from the calling program raise `ValueError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """The base class. The message is for users."""


class ModelLoadError(EngineError):
    """The message says what to do."""


class UnsupportedModel(EngineError):
    """The model needs something that the engine does not support. Raised before weights are read wherever possible."""


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
    """The requested tokens do not fit the context."""

    def __init__(self, position: int, tokens: int, context_tokens: int) -> None:
        super().__init__(f"{tokens} tokens at position {position} do not fit a context of {context_tokens} tokens")


class StageFailed(EngineError):
    """A stage failed. Rows up to the session's position are still valid."""

    def __init__(self, stage: int, doing: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage} failed in {doing}: {type(cause).__name__}: {cause}")
        self.stage = stage


class UnreadableImage(EngineError):
    """The message continues `The image cannot be read:`."""


class TemplateRefused(EngineError):
    """The message is the template's own."""


class BadLogits(EngineError):
    """No allowed token has a finite logit: the weights are damaged, or a mask allows no token."""


class UnknownVector(EngineError):
    """A request names a control vector that was not loaded."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        loaded = f"These are: {', '.join(known)}." if known else "None is loaded: start with --control-vector."
        super().__init__(f"There is no control vector {name!r}. {loaded}")


class SnapshotError(EngineError):
    """A snapshot that cannot become the live state."""


class SnapshotMismatch(SnapshotError):
    """Wrong layout, stages, ranges or sizes. Nothing was written; the live state is unchanged."""


class SnapshotDamaged(SnapshotError):
    """A copy failed or a checksum differs. Every stage was reset; the session's position is 0."""
