"""Every error that a user can cause or meet, in one tree.

    ParkdError
    ├── InvalidRequest        400  the body cannot be served as it is
    │   ├── ContextOverflow   400  prompt and output do not fit the context
    │   ├── SchemaTooComplex  400  an answer cannot be held to its schema; may show in the middle of the answer
    │   └── ThreadUnsupported 400  the client sends new messages only and counts on the server for the others
    ├── Unauthorized          401  no key or a wrong one
    ├── Forbidden             403  the request comes from where it may not (Host, Origin)
    ├── NotFound              404
    ├── BodyStalled           408  it stopped coming in
    ├── BodyTooLarge          413
    ├── UpgradeRefused        426  a WebSocket was asked for
    ├── QueueFull             503  with a retry-after
    ├── ShuttingDown          503
    ├── Cancelled             499  the client left; nobody reads the answer
    ├── EngineFailure         500  the engine could not finish this turn; it is valid again
    │   ├── UpstreamFailed    502  a server that parkd stands before answered with an error, with nonsense, or broke off
    │   │   ├── UpstreamTimeout   504  it did not answer in time
    │   │   └── UpstreamDown      503  it cannot be reached, or is still loading its model
    │   └── EngineLost        500  it cannot become valid again: the process must end
    ├── RestoreFailed              parked state was incompatible or damaged; the turn reads cold
    ├── ConfigError                a flag, a variable or the TOML file; exit code 2
    └── ModelError                 a model that cannot be loaded or is refused; exit code 2

Dialects map `status` and `code` to their own shapes; `message` always says what to do next. Errors of libraries are
translated where they are met: `engine` errors in `engine_adapter/torch_engine.py`, file errors in `store/fs.py`.
"""

from __future__ import annotations


class ParkdError(Exception):
    """Base of all. `message` is for the person who caused it and says what to do."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ParkdError):
    status = 400
    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt and the output asked for, is longer than the context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, output_tokens: int, context_tokens: int) -> None:
        super().__init__(
            # clients that see the text alone know an overflow by these first words
            f"This model's maximum context length is {context_tokens} tokens; the request needs "
            f"{prompt_tokens + output_tokens} "
            f"({prompt_tokens} in the prompt, {output_tokens} for the output). Shorten the messages, ask for less "
            f"output, or start parkd with a larger --ctx-size.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.context_tokens = context_tokens


class SchemaTooComplex(InvalidRequest):
    """Enforcing the schema takes more than the grammar library allows itself."""

    code = "schema_too_complex"

    def __init__(self, what: str, *, param: str) -> None:
        super().__init__(
            f"The schema is too complex to be enforced: {what}. Simplify it: fewer properties and alternatives in one "
            f"place, shorter patterns, smaller repetitions.",
            param=param,
        )


class ThreadUnsupported(InvalidRequest):
    """Anthropic's word for it: its SDK looks for the code, and sends the whole history from then on."""

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


class BodyStalled(ParkdError):
    """Clients send a request again that was answered so."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(ParkdError):
    status = 413
    code = "request_too_large"


class UpgradeRefused(ParkdError):
    """Codex goes on over HTTP at once if it is told this status, and after several attempts if another."""

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


class UpstreamFailed(EngineFailure):
    status = 502
    code = "upstream_failed"


class UpstreamTimeout(UpstreamFailed):
    status = 504
    code = "upstream_timeout"


class UpstreamDown(UpstreamFailed):
    status = 503
    code = "upstream_down"


class EngineLost(EngineFailure):
    code = "engine_lost"


class RestoreFailed(ParkdError):
    """Parked state could not be restored. When this is raised every stage is empty and the engine is valid."""

    code = "restore_failed"


class ConfigError(ParkdError):
    code = "config_error"


class ModelError(ParkdError):
    code = "model_error"
