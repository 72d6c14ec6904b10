"""Every error that a user can cause or meet, in one tree.

    ParkdError
    ├── InvalidRequest        400  the request is invalid or asks for something unsupported
    │   ├── AmbiguousLength   400  the body has two lengths
    │   ├── ContextOverflow   400  prompt and output do not fit the context
    │   ├── SchemaTooComplex  400  the schema cannot be enforced; may be found in the middle of the answer
    │   ├── NothingAllowed    400  the request's fields together exclude every token; found in the middle of the answer
    │   ├── UnreadableImage   400  an image that cannot be decoded, or is too large
    │   ├── RenderingTooLong  400  the chat template or a rewrite rule takes too long for these messages
    │   └── ThreadUnsupported 400  the client sends only new messages and expects the server to keep the others
    ├── Unauthorized          401  no API key or a wrong one
    ├── Forbidden             403  the Host or Origin header is not allowed
    ├── NotFound              404
    ├── Conflict              409  the state of a conversation does not allow what was asked
    ├── ConversationUnfit     409  a portable conversation is of another model or format
    ├── ConversationDamaged   422  a portable conversation is cut or damaged
    ├── ConversationRefused   507  a portable conversation finds no room here
    ├── BodyStalled           408  the body stopped arriving
    ├── BodyTooLarge          413
    ├── UpgradeRefused        426  the client asked for a WebSocket
    ├── QueueFull             503  with a retry-after
    ├── ShuttingDown          503
    ├── Cancelled             499  the client left; nobody reads the answer
    ├── EngineFailure         500  the engine could not finish this turn; its state is valid
    │   ├── StageFailed       500  a forward pass or a copy of one stage failed
    │   ├── ContextFull       500  more tokens than the arenas have rows
    │   ├── UpstreamFailed    502  the llama-server reported an error, sent invalid data, or closed the connection
    │   │   ├── UpstreamTimeout   504  it did not answer in time
    │   │   └── UpstreamDown      503  it cannot be reached, or is still loading its model
    │   ├── LogitsNotFinite   500  no token can be chosen: the weights or the state are damaged
    │   └── EngineLost        500  the engine cannot become valid again: the process must end
    ├── RestoreFailed              parked state was incompatible or damaged; the turn reads its prompt cold
    │   ├── SnapshotMismatch       it does not fit this session; found before anything was written
    │   └── SnapshotDamaged        a restore failed after it began to write
    ├── ConfigError                an invalid flag, variable or TOML file; exit code 2
    └── ModelError                 a model that cannot be loaded or is refused; exit code 2
        ├── UnsupportedModel       an architecture, a kind of layer or a setting that is not supported
        ├── InvalidSplit           the layers cannot be divided over the stages as requested
        └── OutOfMemory            an arena does not fit its device

Dialects map `status` and `code` to their own formats; `message` always says what to do next. Errors of libraries are
translated where they occur: those of devices in `parkd_engine/failures.py`, file errors in
`store/files/park_directory.py`. Wrong arguments from the calling program raise `ValueError`.
"""

from __future__ import annotations


class ParkdError(Exception):
    """The base class. `message` is for the user and says what to do."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ParkdError):
    status = 400
    code = "invalid_request"


class AmbiguousLength(InvalidRequest):
    """Two servers on the request's way may disagree about where it ends."""

    def __init__(self) -> None:
        super().__init__(
            "The request has both `content-length` and `transfer-encoding`, so where it ends is ambiguous. Send one of "
            "them, and check the proxy in between."
        )


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt with the requested output, is longer than the context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, output_tokens: int, context_tokens: int, model_tokens: int = 0) -> None:
        """`model_tokens` is the longest context that the model supports; 0 if that is not known."""
        larger = ", or start parkd with a larger --ctx-size, if the model supports one"
        if model_tokens:
            larger = f", or start parkd with a larger --ctx-size (at most {model_tokens})"
            if model_tokens <= context_tokens:
                larger = "; the model supports no longer context"
        super().__init__(
            # Clients that only see the text recognise an overflow by these first words.
            f"This model's maximum context length is {context_tokens} tokens; the request needs "
            f"{prompt_tokens + output_tokens} "
            f"({prompt_tokens} in the prompt, {output_tokens} for the output). Shorten the messages or ask for less "
            f"output{larger}.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.context_tokens = context_tokens


class SchemaTooComplex(InvalidRequest):
    """Enforcing the schema exceeds a limit of the grammar library."""

    code = "schema_too_complex"

    def __init__(self, what: str, *, param: str) -> None:
        super().__init__(
            f"The schema or grammar is too complex to be enforced: {what}. Simplify it: fewer properties and "
            "alternatives in one place, shorter patterns, smaller repetitions.",
            param=param,
        )


class NothingAllowed(InvalidRequest):
    """No token can be chosen although the model has scores: the request excludes all of them here."""

    def __init__(self) -> None:
        super().__init__(
            "No token may come next in this answer: the request's `logit_bias` and the form of the answer exclude them "
            "all. Exclude fewer tokens, or ask for another form.",
            param="logit_bias",
        )


class UnreadableImage(InvalidRequest):
    def __init__(self, reason: str) -> None:
        super().__init__(f"The image cannot be read: {reason}.")
        self.reason = reason


class RenderingTooLong(InvalidRequest):
    def __init__(self, what: str) -> None:
        super().__init__(
            f"Turning the messages into a prompt takes too long: {what}. Send fewer or shorter messages.",
            param="messages",
        )


class ThreadUnsupported(InvalidRequest):
    """Has Anthropic's code for this error: on this code, its SDK sends the whole history from then on."""

    code = "thread_unsupported_request"


class Unauthorized(ParkdError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ParkdError):
    status = 403
    code = "forbidden"


class NotFound(ParkdError):
    status = 404
    code = "not_found"


class Conflict(ParkdError):
    status = 409
    code = "conflict"


class ConversationUnfit(ParkdError):
    status = 409
    code = "conversation_unfit"


class ConversationDamaged(ParkdError):
    status = 422
    code = "conversation_damaged"


class ConversationRefused(ParkdError):
    status = 507
    code = "conversation_refused"


class BodyStalled(ParkdError):
    """Clients retry a request that is answered with this status."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(ParkdError):
    status = 413
    code = "request_too_large"


class UpgradeRefused(ParkdError):
    """On this status, Codex continues over HTTP at once; on any other, only after several attempts."""

    status = 426
    code = "upgrade_refused"


class QueueFull(ParkdError):
    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(QueueFull):
    code = "shutting_down"


class Cancelled(ParkdError):
    status = 499
    code = "cancelled"


class EngineFailure(ParkdError):
    status = 500
    code = "engine_failure"


def unfinished(reason: str) -> str:
    """The message of an EngineFailure that ends one turn."""
    return f"The engine could not finish this turn: {reason.removesuffix('.')}. Send the request again."


class StageFailed(EngineFailure):
    """Rows up to the session's position are still valid."""

    def __init__(self, stage: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class ContextFull(EngineFailure):
    def __init__(self, position: int, tokens: int, context_tokens: int) -> None:
        where = f"a context of {context_tokens} tokens"
        super().__init__(unfinished(f"{tokens} tokens at position {position} do not fit {where}"))


class UpstreamFailed(EngineFailure):
    status = 502
    code = "upstream_failed"


class UpstreamTimeout(UpstreamFailed):
    status = 504
    code = "upstream_timeout"


class UpstreamDown(UpstreamFailed):
    status = 503
    code = "upstream_down"


class LogitsNotFinite(EngineFailure):
    """If all logits are affected, the engine is empty afterwards. Never because of what a request excludes: that is
    NothingAllowed."""


class EngineLost(EngineFailure):
    code = "engine_lost"


class RestoreFailed(ParkdError):
    """Parked state could not be restored. When this is raised, every stage is empty and the engine is valid."""

    code = "restore_failed"


class SnapshotMismatch(RestoreFailed):
    """Wrong layout, stages, ranges or sizes. Raised by the engine's own session, which is unchanged; whoever asked for
    the restore empties it."""


class SnapshotDamaged(RestoreFailed):
    """A copy failed or a checksum differs. Every stage was reset."""


class ConfigError(ParkdError):
    code = "config_error"


class ModelError(ParkdError):
    code = "model_error"


class UnsupportedModel(ModelError):
    """Raised before weights are read wherever possible."""


class InvalidSplit(ModelError):
    """A layer split that the model or the devices do not allow."""


class OutOfMemory(ModelError):
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
