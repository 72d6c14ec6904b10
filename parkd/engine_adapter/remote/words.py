"""How prompts travel to a server, and what its answers are in ids.

CharacterWords    as a chat, to /v1/chat/completions; units are characters, and the server parses its answers
TokenWords        as token ids, to /v1/completions; parkd writes the prompt and reads the answer by the model's template
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from parkd.engine_adapter.base import ChatTemplate, ResponseReader, TextStream, Tokenizer
from parkd.engine_adapter.remote.alphabet import VOCAB_SIZE, Characters, Ids, JoinedText, Mark, ids_of
from parkd.engine_adapter.remote.bodies import chat_fields
from parkd.engine_adapter.remote.events import CallPiece, Piece
from parkd.engine_adapter.remote.flavours import Flavour
from parkd.engine_adapter.remote.parts import PartsParser
from parkd.engine_adapter.remote.talk import Talk, plain_text, read_talk, with_systems_lead
from parkd.errors import UpstreamFailed
from parkd.types import TurnRequest, Unit

MakeReader = Callable[[str, Sequence[Mapping[str, Any]]], ResponseReader]
"""(end of the rendered prompt, tools) -> the reader of one answer."""
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
CHARACTERS_A_TOKEN = 4.0
"""Before a server has counted any prompt."""
NEWEST_WEIGHT = 0.3
"""Weight of the newest prompt in the running mean of characters a token."""


class AnswerIds(Protocol):
    """Turns the pieces of one answer into its ids."""

    def ids(self, piece: Piece) -> Sequence[int]:
        """Raises UpstreamFailed for a piece that cannot be true."""


class Words(Protocol):
    """The language that is spoken with a server. Thread-safe."""

    unit: Unit
    tokenizer: Tokenizer
    template: ChatTemplate
    template_source: str | None
    vocab_size: int
    end_token_ids: frozenset[int]
    parser: type[PartsParser] | None
    """Of answers; None: their text is as the model wrote it."""
    response_reader: MakeReader | None
    """Of answers, as the model's own files declare; None: they declare nothing."""

    def request(self, ids: Ids, request: TurnRequest | None, limit: int | None) -> tuple[str, dict[str, Any]]:
        """The path, and the fields of the request that only this way of asking has."""

    def said_otherwise(
        self, ids: Ids, request: TurnRequest | None, limit: int | None
    ) -> tuple[str, dict[str, Any]] | None:
        """The same request in another way, for a server that has refused it as it was; None if there is none."""

    def taken_otherwise(self) -> None:
        """The server has taken a request that was said otherwise."""

    def answer(self, request: TurnRequest | None) -> AnswerIds: ...

    def text_stream(self) -> TextStream: ...

    def piece(self, unit: int) -> bytes:
        """What one unit writes, also if that is part of a character."""

    def tokens_in(self, units: int) -> int:
        """How many tokens so many units of a prompt are, about."""

    def counted(self, units: int, tokens: int) -> None:
        """Learns from a prompt whose tokens the server has counted."""


class CharacterWords:
    """For servers whose tokens are not known: prompts are chats, and the server parses its answers."""

    unit = Unit.CHARACTER
    vocab_size = VOCAB_SIZE
    end_token_ids = frozenset({Mark.END.id})
    template_source: str | None = None
    parser: type[PartsParser] | None = PartsParser
    response_reader: MakeReader | None = None

    def __init__(self, flavour: Flavour, template: ChatTemplate) -> None:
        self.tokenizer: Tokenizer = Characters()
        self.template = template
        self._flavour = flavour
        self._lock = threading.Lock()
        self._systems_lead = False
        """The server's template takes system messages at the beginning only."""
        self._characters_a_token = CHARACTERS_A_TOKEN

    def request(self, ids: Ids, request: TurnRequest | None, limit: int | None) -> tuple[str, dict[str, Any]]:
        text = plain_text(ids)
        if text is not None:
            body: dict[str, Any] = {"prompt": text}
            if limit is not None:
                body["max_tokens"] = max(limit, 1)
            return COMPLETIONS_PATH, body
        talk = self._talk(ids)
        if self._systems_lead:
            talk = with_systems_lead(talk)
        return CHAT_PATH, chat_fields(talk, request, limit, self._flavour)

    def said_otherwise(
        self, ids: Ids, request: TurnRequest | None, limit: int | None
    ) -> tuple[str, dict[str, Any]] | None:
        """With system messages behind the first others as the user's, which the templates of many models want."""
        if self._systems_lead or plain_text(ids) is not None:
            return None
        talk = self._talk(ids)
        other = with_systems_lead(talk)
        return (
            None if other.messages == talk.messages else (CHAT_PATH, chat_fields(other, request, limit, self._flavour))
        )

    def taken_otherwise(self) -> None:
        self._systems_lead = True

    def _talk(self, ids: Ids) -> Talk:
        return read_talk(ids, thought_field=self._flavour.thought_field or "reasoning_content")

    def answer(self, request: TurnRequest | None) -> AnswerIds:
        return JoinedParts(offers_tools=request is not None and bool(request.tools))

    def text_stream(self) -> TextStream:
        return JoinedText()

    def piece(self, unit: int) -> bytes:
        return self.tokenizer.decode([unit]).encode()

    def tokens_in(self, units: int) -> int:
        return max(1, round(units / self._characters_a_token)) if units else 0

    def counted(self, units: int, tokens: int) -> None:
        if units > 0 and tokens > 0:
            with self._lock:
                self._characters_a_token += NEWEST_WEIGHT * (units / tokens - self._characters_a_token)


class JoinedParts:
    """Joins the parts of one answer by marks, as the template writes an earlier answer."""

    def __init__(self, *, offers_tools: bool) -> None:
        self._offers_tools = offers_tools
        self._part = Mark.ASSISTANT
        self._call = -1
        """The index of the open call, as the server counts."""
        self._has_arguments = False

    def ids(self, piece: Piece) -> Sequence[int]:
        ids: list[int] = []
        if piece.thinking:
            ids += [*self._switched(Mark.THINKING), *ids_of(piece.thinking)]
        if piece.text:
            if self._part is not Mark.ASSISTANT:  # text at the beginning needs no mark
                ids += self._switched(Mark.TEXT)
            else:
                self._part = Mark.TEXT
            ids += ids_of(piece.text)
        for call in piece.calls:
            ids += self._called(call)
        if piece.finish is not None:
            ids += self._ended()
        return ids

    def _switched(self, mark: Mark) -> Iterator[int]:
        yield from self._ended()
        if self._part is not mark:
            self._part = mark
            yield mark.id

    def _called(self, call: CallPiece) -> list[int]:
        if not self._offers_tools:
            raise UpstreamFailed("The upstream server calls a tool, and none was offered. Send the request again.")
        ids: list[int] = []
        if self._part is not Mark.CALL or call.index != self._call:
            if not call.name:
                raise UpstreamFailed("The upstream server calls a tool without a name. Send the request again.")
            ids += [*self._ended(), Mark.CALL.id, *ids_of(call.name)]
            self._part, self._call, self._has_arguments = Mark.CALL, call.index, False
        if call.arguments:
            ids += self._arguments()
            ids += ids_of(call.arguments)
        return ids

    def _arguments(self) -> list[int]:
        if self._has_arguments:
            return []
        self._has_arguments = True
        return [Mark.ARGUMENTS.id]

    def _ended(self) -> list[int]:
        """Of a call without arguments, where they would be."""
        return [*self._arguments(), *ids_of("{}")] if self._part is Mark.CALL and not self._has_arguments else []


class TokenText(Tokenizer, Protocol):
    """A model's tokenizer, which can also write answers."""

    def text(self) -> TextStream: ...

    def piece(self, token_id: int) -> bytes:
        """What a token writes."""


class TokenWords:
    """For servers that take ids and return those of their answers, where the model's tokenizer is at hand."""

    unit = Unit.TOKEN
    parser: type[PartsParser] | None = None

    def __init__(
        self,
        tokenizer: TokenText,
        template: ChatTemplate,
        template_source: str | None,
        *,
        end_token_ids: frozenset[int],
        vocab_size: int,
        context_tokens: int,
        response_reader: MakeReader | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self.response_reader = response_reader
        self.template = template
        self.template_source = template_source
        self.end_token_ids = end_token_ids
        self.vocab_size = vocab_size
        self._text = tokenizer.text
        self._piece = tokenizer.piece
        self._context_tokens = context_tokens
        control = [tokenizer.encode(token) for token in tokenizer.control_tokens]
        self._ends = end_token_ids | {ids[0] for ids in control if len(ids) == 1}

    def request(self, ids: Ids, request: TurnRequest | None, limit: int | None) -> tuple[str, dict[str, Any]]:
        room = max(1, self._context_tokens - len(ids))
        body = {
            "prompt": ids,
            "max_tokens": room if limit is None else max(1, min(limit, room)),
            "return_token_ids": True,
            "skip_special_tokens": False,  # the text is not read, but some servers return ids as they write text
        }
        top = None if request is None else request.sampling.top_logprobs
        if top is not None:
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
        return COMPLETIONS_PATH, body

    def said_otherwise(
        self,
        ids: Ids,  # noqa: ARG002
        request: TurnRequest | None,  # noqa: ARG002
        limit: int | None,  # noqa: ARG002
    ) -> tuple[str, dict[str, Any]] | None:
        """None: the template is the server's own, and was asked before."""
        return None

    def taken_otherwise(self) -> None:
        """Never called: nothing is said otherwise."""

    def answer(self, request: TurnRequest | None) -> AnswerIds:  # noqa: ARG002
        return ReturnedIds(self._ends)

    def text_stream(self) -> TextStream:
        return self._text()

    def piece(self, unit: int) -> bytes:
        return self._piece(unit)

    def tokens_in(self, units: int) -> int:
        return units

    def counted(self, units: int, tokens: int) -> None:
        """Nothing is to be learned: units are tokens."""


class ReturnedIds:
    """The ids of one answer, as the server returns them."""

    def __init__(self, ends: frozenset[int]) -> None:
        """`ends` are ids of which one may stand last in an answer that has ended, and is no part of it."""
        self._ends = ends

    def ids(self, piece: Piece) -> Sequence[int]:
        ids = list(piece.token_ids or ())
        if piece.text and not ids:
            raise UpstreamFailed(
                "The upstream server does not return the ids of its answer. Use a newer one, or leave out --tokenizer."
            )
        if piece.finish == "stop" and ids and ids[-1] in self._ends:
            ids.pop()
        return ids
