"""The tokenizer and the chat template of a loaded model, as the library's fast tokenizer provides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from engine.load_errors import ModelLoadError, TemplateRefused
from engine.text import TextAssembler, TokenBytes


class ChatTokenizer:
    """Text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a library tokenizer. Raises ModelLoadError if it is not a fast one."""
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError("The model has no fast tokenizer (tokenizer.json), which is needed.")
        self._backend = tokenizer.backend_tokenizer
        # Padding or cutting a prompt would change what the model reads; some files switch them on.
        self._backend.no_padding()
        self._backend.no_truncation()
        self._token_bytes = TokenBytes.of(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens: tuple[str, ...] = tuple(added[number].content for number in sorted(added))
        """Texts that are cut out before anything else, in the order of their ids."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def text(self, stop: Sequence[str]) -> TextAssembler:
        """An answer's text, from ids yet to come."""
        return TextAssembler(self._token_bytes, stop)


class ChatTemplate:
    """Messages to the text that the model reads, in the library's sandbox. Thread-safe."""

    def __init__(self, tokenizer: Any, source: str | None) -> None:
        """`source` replaces the model's own template."""
        self._tokenizer = tokenizer
        self._source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises TemplateRefused with the template's words, or with what to do if there is no template."""
        if self._source is None and not self._tokenizer.chat_template:
            raise TemplateRefused(
                "This model has no chat template. Send plain text to /v1/completions, or start with "
                "--chat-template-file FILE."
            )
        reserved = {"chat_template", "tokenize", "add_generation_prompt", "conversation", "tools", "messages"}
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **{name: value for name, value in kwargs.items() if name not in reserved},
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template is a program fed by the request: whatever it trips over lies in the messages.
            raise TemplateRefused(f"The chat template refuses these messages: {error}") from error
        return text
