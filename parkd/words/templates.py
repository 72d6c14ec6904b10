"""The chat template of a model: messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from parkd.errors import InvalidRequest
from parkd.words.jinja_templates import render

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tokenize",
        "tools",
    }
)
"""The renderer's own arguments, which a request's template arguments cannot override."""


class TemplateSource(Protocol):
    """Where a model's templates are: a tokenizer of transformers, or what stands for it."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    def get_chat_template(self, source: str | None, tools: Any) -> str: ...


class ChatTemplate:
    """Renders messages to the prompt text, in a sandbox. Thread-safe."""

    def __init__(self, tokenizer: TemplateSource, source: str | None) -> None:
        """`source` replaces the model's own template."""
        self._tokenizer = tokenizer
        self._source = source

    @property
    def source(self) -> str | None:
        """The template's text; the one for tools if there are several, None if there is none."""
        if self._source is None and not self._tokenizer.chat_template:
            return None
        text: str = self._tokenizer.get_chat_template(self._source, [{}])
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text. Raises InvalidRequest with the template's message, or with advice if there is none."""
        if self._source is None and not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template. Send plain text to /v1/completions, or start with "
                "--chat-template-file FILE.",
                param="messages",
            )
        if not messages:
            raise InvalidRequest("There are no messages for the chat template.", param="messages")
        shown = [dict(tool) for tool in tools] or None
        own = {name: value for name, value in kwargs.items() if name not in RESERVED}
        try:
            return render(
                self._tokenizer.get_chat_template(self._source, shown),
                [message if isinstance(message, dict) else dict(message) for message in messages],
                shown,
                {**self._tokenizer.special_tokens_map, **own},
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template is a program whose input is the request, so errors in it are caused by the messages.
            raise InvalidRequest(f"The chat template refuses these messages: {error}", param="messages") from error
