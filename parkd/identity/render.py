"""From a request's messages to the text that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parkd.engine_adapter.base import ChatTemplate, UnprovenText
from parkd.errors import InvalidRequest, ParkdError
from parkd.identity.canonical import CanonicalMessage, canonical_messages, canonical_tools
from parkd.identity.normalise import Normaliser
from parkd.identity.profile import SystemInside, TemplateProfile, probe_template
from parkd.types import Proof, Rewrite, TurnRequest


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
        turns = canonical_messages(messages, self.profile, first_origin=dropped)
        try:
            text = self._text(turns, tools, request.template_kwargs)
        except InvalidRequest:
            # The probe tested system messages between user and assistant turns; elsewhere a template may still refuse
            # them.
            merged = replace(self.profile, system_inside=SystemInside.MERGED)
            again = canonical_messages(messages, merged, first_origin=dropped)
            if again == turns:
                raise
            turns = again
            text = self._text(turns, tools, request.template_kwargs)
        proof = text.proof if isinstance(text, UnprovenText) else None
        return RenderedPrompt(str(text), tuple(turns), bool(tools), rewrites, proof)

    def _text(
        self, turns: Sequence[CanonicalMessage], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str:
        try:
            return self._template.render([turn.message for turn in turns], tools, kwargs)
        except ParkdError:
            raise
        except Exception as error:  # A template is a program: whatever it raises, it cannot render this request.
            raise InvalidRequest(
                f"The model's chat template cannot take these messages ({error}). Check roles, content and tool calls.",
                param="messages",
            ) from error
