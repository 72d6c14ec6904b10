"""An OpenAI-style server, as the canary asks it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from parkd.errors import ConfigError
from parkd_tier.canary import ANSWER_TOKENS, Reply

ANSWER_S = 300.0
RETRY_S = 2.0


class Server:
    """Waits up to `wait_s` for a server to answer. Raises ConfigError if it does not."""

    def __init__(self, url: str, api_key: str | None, wait_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is no address of a server: it begins with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = self._first_model(wait_s)

    def ask(self, prompt: list[int], salt: str, params: Mapping[str, Any]) -> Reply:
        """Raises OSError and ValueError if the server does not answer as it should."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "min_tokens": ANSWER_TOKENS,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": params,
        }
        told = self._send("/v1/completions", json.dumps(body).encode())["choices"][0]["logprobs"]
        return Reply(tuple(map(str, told["tokens"])), tuple(map(float, told["token_logprobs"])))

    def _first_model(self, wait_s: float) -> str:
        until_s = time.monotonic() + wait_s
        while True:
            try:
                return str(self._send("/v1/models", None)["data"][0]["id"])
            except (OSError, ValueError, KeyError, IndexError) as error:
                if time.monotonic() > until_s:
                    raise ConfigError(f"{self._url} does not answer: {error}") from error
                time.sleep(RETRY_S)

    def _send(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._url + path, body, self._headers)  # noqa: S310 - checked above
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise OSError(f"{error.code} {error.read(500).decode(errors='replace')}") from error
