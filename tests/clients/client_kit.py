"""A server that answers what a test says, for clients that block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parkd.answers.base import OutputFormat, ReasoningMarks, ToolFormat
from parkd.answers.structured import StructuredOutput
from parkd.answers.thinking import ThinkingLimits
from parkd.proxy.config import ProxyConfig
from parkd.proxy.server import Server
from tests.fakes.engine import FakeEngine
from tests.fakes.text import SPECIAL_TOKENS
from tests.integration.api.api_harness import running_in_thread

FORMAT = OutputFormat(ToolFormat.HERMES, ReasoningMarks("<think>", "</think>"))
CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"path": "a/b", "depth": 2}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "look", "arguments": {"path": "c"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}


@dataclass
class Served:
    server: Server
    engine: FakeEngine

    @property
    def url(self) -> str:
        return self.server.url


@contextmanager
def serving(
    script: str | Callable[[str], str | None] | None = None,
    *,
    context_tokens: int = 32768,
    config: ProxyConfig | None = None,
    hook: Callable[[str, int], None] | None = None,
) -> Iterator[Served]:
    """`script` is the answer, or gives one for a prompt's text."""
    answer = (lambda _prompt: script) if isinstance(script, str) else script
    engine = FakeEngine(script=answer, context_tokens=context_tokens, hook=hook)
    structured = StructuredOutput(byte_tokenizer().to_str(), engine.info.vocab_size, engine.info.end_token_ids)
    limits = ThinkingLimits(FORMAT.reasoning, None, engine.info.vocab_size, engine.tokenizer.encode, engine.text_stream)
    with running_in_thread(
        engine,
        config,
        output=FORMAT,
        build_mask=lambda request, tail, _: limits.over(request, tail, structured.mask(request, FORMAT, tail)),
    ) as server:
        yield Served(server, engine)


def byte_tokenizer() -> Tokenizer:
    """The fake engine's vocabulary as a `tokenizer.json`: id b is byte b, then the special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return made


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
