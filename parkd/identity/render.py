"""From a request's messages to the text that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parkd.engine_adapter.base import ChatTemplate, Rendered
from parkd.errors import InvalidRequest, ParkdError
from parkd.identity.canonical import CanonicalMessage, canonical_content, canonical_messages, canonical_tools
from parkd.identity.normalise import Normaliser
from parkd.identity.profile import SystemInside, TemplateProfile, probe_template
from parkd.types import Message, Proof, Rewrite, TurnRequest

THOUGHT_STARTS = ("<think>", "[THINK]", "<seed:think>", "<|channel>thought")
"""What templates end with that open thinking. Behind it, a message that the client began would be read as thinking."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    turns: tuple[CanonicalMessage, ...] = ()
    """What was rendered, in order; empty for a raw prompt."""
    has_tools: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    proof: Proof | None = None


class Renderer:
    """Probes at construction what the template accepts. Stateless afterwards, so thread-safe."""

    def __init__(self, template: ChatTemplate, normaliser: Normaliser) -> None:
        self._template = template
        self._normaliser = normaliser
        self.profile: TemplateProfile = probe_template(template)

    def render(self, request: TurnRequest) -> RenderedPrompt:
        """Raises InvalidRequest if the template refuses the messages, or if there are none."""
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
                text = rendered.text + beginning
                return RenderedPrompt(text, tuple(turns), bool(tools), rewrites, rendered.proof)
        turns, rendered = self._turns(messages, dropped, tools, request.template_kwargs)
        return RenderedPrompt(rendered.text, tuple(turns), bool(tools), rewrites, rendered.proof)

    def _turns(
        self,
        messages: Sequence[Message],
        first_origin: int,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> tuple[Sequence[CanonicalMessage], Rendered]:
        """The messages in the form that the template takes, and what it writes for them."""
        turns = canonical_messages(messages, self.profile, first_origin=first_origin)
        try:
            return turns, self._text(turns, tools, kwargs)
        except InvalidRequest:
            # The probe tested system messages between user and assistant turns; elsewhere a template may still refuse
            # them.
            merged = replace(self.profile, system_inside=SystemInside.MERGED)
            again = canonical_messages(messages, merged, first_origin=first_origin)
            if again == turns:
                raise
            return again, self._text(again, tools, kwargs)

    def _text(
        self, turns: Sequence[CanonicalMessage], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> Rendered:
        try:
            return self._template.render([turn.message for turn in turns], tools, kwargs)
        except ParkdError:
            raise
        except Exception as error:  # A template is a program: whatever it raises, it cannot render this request.
            raise InvalidRequest(
                f"The model's chat template cannot take these messages ({error}). Check roles, content and tool calls.",
                param="messages",
            ) from error
