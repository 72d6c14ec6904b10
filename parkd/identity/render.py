"""From a request's messages to the text that the model reads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parkd.engine_adapter.base import ChatTemplate, Rendered, Tokenizer
from parkd.errors import Cancelled, InvalidRequest, ParkdError, RenderingTooLong
from parkd.identity.canonical import CanonicalMessage, canonical_content, canonical_messages, canonical_tools
from parkd.identity.fill import fill_prompt
from parkd.identity.normalise import Normaliser, RewriteRule
from parkd.identity.profile import SystemInside, TemplateProfile, as_shown, probe_template
from parkd.identity.stand_ins import StandIns, needed, over_texts, texts_of
from parkd.types import Message, Proof, Rewrite, TurnRequest

CONTROL_FORM = re.compile(r"<[|\uff5c].*[|\uff5c]>")
MARK_STARTS = frozenset("<[|")
"""With what tokens begin that are marks and no words."""
THOUGHT_STARTS = ("<think>", "[THINK]", "<seed:think>", "<|channel>thought")
"""What templates end with that open thinking. Behind it, a message that the client began would be read as thinking."""


MOST_TRIALS = 128
"""Most renderings of one prompt by which it is found out which words of a client its template needs."""
LOOKED_FOR = frozenset({"<think>", "</think>", "<tool_response>", "</tool_response>", "[THINK]", "[/THINK]"})
"""What templates look for in messages, whether or not it is a token of the model."""
_REST = ""
"""In the place of a control token: everything in a text besides whole control tokens."""

Part = tuple[str, str]
"""Who says it (a role, or the field of the request), and one control token in it, or `_REST`."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    """With stand-ins where a client's words could be taken for control tokens (`stand_ins`)."""
    turns: tuple[CanonicalMessage, ...] = ()
    """What was rendered, in order; empty for a raw prompt."""
    has_tools: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    proof: Proof | None = None


class Renderer:
    """Probes at construction what the template accepts. Afterwards only its rules change, as a whole, so it is
    thread-safe."""

    def __init__(
        self, template: ChatTemplate, normaliser: Normaliser, tokenizer: Tokenizer | None = None, placeholder: str = ""
    ) -> None:
        """`placeholder` is what the template writes for an image. Without a `tokenizer`, nothing has stand-ins."""
        self._template = template
        self._normaliser = normaliser
        self.profile: TemplateProfile = probe_template(template)
        self.stand_ins = StandIns()
        self._structure: frozenset[str] = frozenset()
        self._special_tokens = () if tokenizer is None else tokenizer.special_tokens
        if tokenizer is not None:
            # Many files call tokens ordinary that are not: some in the form of control tokens, and the marks of calls,
            # results and thinking.
            formed = (token for token in tokenizer.special_tokens if CONTROL_FORM.fullmatch(token))
            control = {*tokenizer.control_tokens, *formed, placeholder} - {""}
            marks = (token for token in tokenizer.special_tokens if token[:1] in MARK_STARTS)
            self._structure = frozenset(token for token in marks if token in self.profile.written) - control
            self.stand_ins = StandIns(control | self._structure, tokenizer.special_tokens)

    def add_rule(self, rule: RewriteRule) -> int:
        """Applies one more rule from now on. Returns how many there are. Raises ConfigError."""
        self._normaliser = self._normaliser.with_rule(rule)
        return len(self._normaliser.config.rules)

    def over(self, template: ChatTemplate) -> Renderer:
        """The same with another `template`, which must write what the one that was probed writes."""
        other = copy.copy(self)
        other._template = template
        return other

    def render(self, request: TurnRequest) -> RenderedPrompt:
        """Raises InvalidRequest if the template refuses the messages, or if there are none."""
        if request.infill is not None:
            return RenderedPrompt(fill_prompt(request.infill, self._special_tokens, self.stand_ins.put))
        if request.prompt is not None:
            return RenderedPrompt(request.prompt)
        if not request.messages:
            raise InvalidRequest("The request has no messages. Send at least one.", param="messages")
        messages, rewrites = self._normaliser.apply(request.messages)
        dropped = len(request.messages) - len(messages)
        tools = canonical_tools(request.tools)
        if request.continues and len(messages) > 1:
            beginning = canonical_content(messages[-1].get("content"))
            turns, rendered = self._turns(messages[:-1], dropped, tools, request.template_kwargs)
            if beginning and isinstance(beginning, str) and not rendered.text.rstrip().endswith(THOUGHT_STARTS):
                # The model's own marks of thinking and calls stay, so that an answer which broke off in one goes on.
                text = self._told(turns, tools, request.template_kwargs, rendered.text)
                text += self.stand_ins.put(beginning, self._structure)
                return RenderedPrompt(text, tuple(turns), bool(tools), rewrites, rendered.proof)
        turns, rendered = self._turns(messages, dropped, tools, request.template_kwargs, opens=request.opens_answer)
        text = self._told(turns, tools, request.template_kwargs, rendered.text, opens=request.opens_answer)
        return RenderedPrompt(text, tuple(turns), bool(tools), rewrites, rendered.proof)

    def _told(
        self,
        turns: Sequence[CanonicalMessage],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        plain: str,
        *,
        opens: bool = True,
    ) -> str:
        """`plain`, which is what the template writes, with stand-ins in what the client said.

        The template is rendered again, from messages with stand-ins, and must write the same. If it does not, because
        it looks for some word in a message (`</think>`), that word is left to it, and as little else as possible.
        """
        said = [*((turn.role, turn.message) for turn in turns), ("tools", tools), ("template_kwargs", kwargs)]
        marked = [over_texts(value, self.stand_ins.put) for _, value in said]
        if marked == [value for _, value in said]:
            return plain
        text = self._told_by(turns, marked, plain, opens=opens)
        if text is not None:
            return text
        best, trials = plain, 0

        def holds(kept: Set[Part]) -> bool:
            """Whether the template writes the same if these parts have no stand-ins."""
            nonlocal best, trials
            trials += 1
            if trials > MOST_TRIALS:
                return False
            marked = [over_texts(value, self._put_but(who, kept)) for who, value in said]
            text = self._told_by(turns, marked, plain, opens=opens)
            best = best if text is None else text
            return text is not None

        parts = self._parts(said)
        marks = [part for part in parts if part[1] in self._structure | LOOKED_FOR]
        holds(needed(marks if holds(frozenset(marks)) else parts, holds))
        return best

    def _put_but(self, who: str, kept: Set[Part]) -> Callable[[str], str]:
        tokens = {token for by, token in kept if by == who and token != _REST}
        return partial(self.stand_ins.put, kept=tokens, everywhere=(who, _REST) not in kept)

    def _told_by(
        self, turns: Sequence[CanonicalMessage], marked: Sequence[Any], plain: str, *, opens: bool
    ) -> str | None:
        """What the template writes for messages, tools and settings with stand-ins; None if that is not `plain`."""
        *said, tools, kwargs = marked
        told = [{**message, "role": turn.message["role"]} for message, turn in zip(said, turns, strict=True)]
        messages = [as_shown(message, self.profile) for message in told]
        try:
            rendered = self._template.render(messages, tools, kwargs, add_generation_prompt=opens)
        except (Cancelled, RenderingTooLong):
            raise
        except Exception:  # a template may raise anything for words that it does not know
            return None
        return rendered.text if self.stand_ins.undo(rendered.text) == plain else None

    def _parts(self, said: Sequence[tuple[str, Any]]) -> list[Part]:
        texts: dict[str, list[str]] = {}
        for who, value in said:
            texts.setdefault(who, []).extend(texts_of(value))
        return [
            (who, token)
            for who, found in texts.items()
            for token in [*sorted(self.stand_ins.tokens_in(found) | _looked_for(found)), _REST]
        ]

    def _turns(
        self,
        messages: Sequence[Message],
        first_origin: int,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        opens: bool = True,
    ) -> tuple[Sequence[CanonicalMessage], Rendered]:
        """The messages in the form that the template takes, and what it writes for them."""
        turns = canonical_messages(messages, self.profile, first_origin=first_origin)
        try:
            return turns, self._text(turns, tools, kwargs, opens=opens)
        except RenderingTooLong:
            raise
        except InvalidRequest:
            # The probe tested system messages between user and assistant turns; elsewhere a template may still refuse
            # them.
            merged = replace(self.profile, system_inside=SystemInside.MERGED)
            again = canonical_messages(messages, merged, first_origin=first_origin)
            if again == turns:
                raise
            return again, self._text(again, tools, kwargs, opens=opens)

    def _text(
        self,
        turns: Sequence[CanonicalMessage],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        opens: bool,
    ) -> Rendered:
        try:
            messages = [as_shown(turn.message, self.profile) for turn in turns]
            return self._template.render(messages, tools, kwargs, add_generation_prompt=opens)
        except ParkdError:
            raise
        except Exception as error:  # A template is a program: whatever it raises, it cannot render this request.
            raise InvalidRequest(
                f"The model's chat template cannot take these messages ({error}). Check roles, content and tool calls.",
                param="messages",
            ) from error


def _looked_for(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(word for word in LOOKED_FOR if any(word in text for text in texts))
