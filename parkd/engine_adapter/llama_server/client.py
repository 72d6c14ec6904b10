"""The HTTP client for a llama-server.

API: llama.cpp, `tools/server/README.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parkd.config import Deadlines
from parkd.engine_adapter.http.client import DEADLINES, HttpClient, UpstreamRefused
from parkd.engine_adapter.llama_server.stream import CompletionStream

__all__ = ["SlotAnswer", "SlotState", "UpstreamClient", "UpstreamRefused"]

CALLED = "llama-server"
MOST_CONNECTIONS = 16
"""One for the engine's thread; the others for the workers that render and tokenise."""


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """The result of saving or restoring a slot."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `/slots` describes it."""

    id: int
    is_processing: bool
    tokens: int | None
    """Tokens in the slot; None if this server does not tell, or no request has used the slot."""
    task: int | None


class UpstreamClient(HttpClient):
    """A client for one llama-server."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines = DEADLINES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            url,
            called=CALLED,
            most_connections=MOST_CONNECTIONS,
            api_key=api_key,
            deadlines=deadlines,
            monotonic=monotonic,
        )

    def properties(self) -> Mapping[str, Any]:
        return self.object("GET", "/props")

    def models(self) -> Mapping[str, Any]:
        """The first entry of `/v1/models`: name and `meta`."""
        document = self.object("GET", "/v1/models")
        data = document.get("data")
        if not isinstance(data, list) or not data or not isinstance(data[0], Mapping):
            raise self.nonsense("/v1/models", "it lists no model")
        return data[0]

    def adapters(self) -> list[Mapping[str, Any]]:
        """LoRA adapters: `id`, `path` and `scale` of each."""
        listed = self.call("GET", "/lora-adapters", None, self._deadlines.answer_s)
        if not isinstance(listed, list):
            raise self.nonsense("/lora-adapters", "it is not a list")
        return listed

    def slots(self) -> list[SlotState]:
        listed = self.call("GET", "/slots", None, self._deadlines.answer_s)
        try:
            return [
                SlotState(
                    int(each["id"]), bool(each["is_processing"]), each.get("n_prompt_tokens"), each.get("id_task")
                )
                for each in listed
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise self.nonsense("/slots", "it is not a list of slots") from error

    def apply_template(self, body: Mapping[str, Any]) -> str:
        text = self.object("POST", "/apply-template", body).get("prompt")
        if not isinstance(text, str):
            raise self.nonsense("/apply-template", "it has no `prompt`")
        return text

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        tokens = self.object("POST", "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self.nonsense("/tokenize", "it has no list of `tokens`")
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        text = self.object("POST", "/detokenize", {"tokens": list(token_ids)}).get("content")
        if not isinstance(text, str):
            raise self.nonsense("/detokenize", "it has no `content`")
        return text

    def save(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "save", {"filename": filename}, "n_saved", "n_written")

    def restore(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "restore", {"filename": filename}, "n_restored", "n_read")

    def complete(self, body: Mapping[str, Any]) -> CompletionStream:
        """Starts a streamed completion, which the caller must close. Returns once the server begins to answer."""
        return CompletionStream(self.events("/completion", body))

    def _slot(self, slot: int, action: str, body: Mapping[str, Any], tokens: str, size: str) -> SlotAnswer:
        path = f"/slots/{slot}?action={action}"
        answer = self.call("POST", path, body, self._deadlines.file_s)
        if not isinstance(answer, Mapping) or not all(isinstance(answer.get(name), int) for name in (tokens, size)):
            raise self.nonsense(path, f"it lacks `{tokens}` or `{size}`")
        if answer.get("id_slot", slot) != slot:  # the server replaces an unknown slot id by another one
            raise self.nonsense(path, f"it is about slot {answer['id_slot']}")
        return SlotAnswer(answer[tokens], answer[size])
