"""OpenAI's Responses API, without stored state: request bodies to turns. `responses_stream` encodes the answers.

Clients send an earlier answer back as separate items (reasoning, message, calls). They are joined into one assistant
message for the template. Unknown items, fields and tools are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parkd.errors import InvalidRequest, ParkdError
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.base import Encoder, ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.nested import (
    allowed_choice,
    asked_form,
    cache_hints,
    check_named,
    function_tool,
    image_part,
    name_at,
    object_at,
    objects,
    strict_names,
    text_at,
    wrong,
)
from parkd.proxy.dialects.openai_errors import error_answer
from parkd.proxy.dialects.progress_summaries import is_progress
from parkd.proxy.dialects.responses_stream import ResponsesEncoder, opened_reasoning
from parkd.proxy.dialects.thinking import reasoning_of, template_words
from parkd.types import ToolChoice, ToolChoiceMode, TurnRequest

REFUSED = {
    "previous_response_id": "this server keeps no responses. Send the whole history in `input`.",
    "conversation": "this server keeps no conversations. Send the whole history in `input`.",
    "background": "this server answers while you wait. Leave it out.",
    "prompt": "this server has no stored prompts. Send the text in `instructions` and `input`.",
}
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
ROLES = frozenset({"user", "assistant", "system", "developer"})
NAMESPACE_SEPARATOR = "__"


class OpenAIResponses(TurnDialect):
    """`POST /v1/responses`."""

    streamed_errors = frozenset({"context_length_exceeded"})
    """Clients expect it in `response.failed`."""

    def __init__(self, *, tells_progress: bool = False) -> None:
        """`tells_progress`: streams tell how far a prompt is read, unless a request says otherwise."""
        self._tells_progress = tells_progress

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        for name, advice in REFUSED.items():
            if body.get(name) not in (None, False):
                raise InvalidRequest(f"`{name}` cannot be used: {advice}", param=name)
        tools = _tools(body)
        reasoning = reasoning_of(body, text_at(fields.obj(body, "reasoning"), "effort", "reasoning") or None)
        form = asked_form(body, object_at(fields.obj(body, "text"), "format", "text"), "text.format")
        return TurnRequest(
            messages=_messages(body),
            tools=[tool for tool, _, _ in tools.values()],
            template_kwargs=template_words(body, reasoning),
            sampling=replace(
                fields.sampling(body), top_logprobs=fields.top_logprobs(body, asked=_wants_logprobs(body))
            ),
            stop=fields.stop_strings(body, "stop"),
            max_output_tokens=0 if _only_prewarms(body) else fields.limit(body, "max_output_tokens"),
            stream=fields.flag(body, "stream", default=False),
            model=fields.text(body, "model"),
            strict_tools=strict_names((name, given) for name, (_, _, given) in tools.items()),
            tool_choice=_tool_choice(body, [tool for tool, _, _ in tools.values()]),
            parallel_tool_calls=fields.flag(body, "parallel_tool_calls", default=True),
            response_schema=form[0],
            response_form=form[1],
            reasoning=reasoning,
            cache=cache_hints(body, headers),
            steering=fields.steering(body),
            adapters=fields.adapters(body),
        )

    def parse_count(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """A body of `/v1/responses/input_tokens`. Raises InvalidRequest."""
        return self.parse(body, headers)

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder:
        namespaces = {name: namespace for name, (_, namespace, _) in _tools(body).items() if namespace is not None}
        seals = "reasoning.encrypted_content" in fields.items(body, "include")
        progress = fields.flag(body, "return_progress", default=self._tells_progress)
        return ResponsesEncoder(meta, request, body, namespaces, seals_reasoning=seals, tells_progress=progress)

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:  # noqa: ARG002 - it goes out as a header
        return error_answer(error)


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    return bool(body.get("top_logprobs")) or "message.output_text.logprobs" in fields.items(body, "include")


def _only_prewarms(body: Mapping[str, Any]) -> bool:
    return fields.flag(fields.obj(body, "prompt_cache_options"), "prewarm", default=False)


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Raises InvalidRequest if there is no message."""
    messages: list[Mapping[str, Any]] = []
    if instructions := fields.text(body, "instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif given is not None:
        history = _History()
        for index, item in enumerate(objects(given, "input")):
            history.add(item, f"input[{index}]")
        messages += history.messages
    if not given:
        raise InvalidRequest("`input` is missing or empty. Send a string or a list of items.", param="input")
    return messages


class _History:
    """Converts items to messages. `_draft` is the assistant message to which the next item may belong."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._draft: dict[str, Any] | None = None

    def add(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            if thought := _thought(item, path):
                self._turn(after=("content", "tool_calls"))["reasoning_content"] = thought
        elif kind in ("function_call", "custom_tool_call"):
            self._turn().setdefault("tool_calls", []).append(_call(item, path))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._draft = None
            call_id = text_at(item, "call_id", path)
            content = _content(item.get("output"), f"{path}.output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "item_reference":
            raise InvalidRequest(
                f"`{path}` refers to a stored item; this server keeps none. Send the item itself.", param=path
            )

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{path}.role", "`user`, `assistant`, `system` or `developer`")
        content = _content(item.get("content"), f"{path}.content")
        if role == "assistant":
            self._turn(after=("content", "tool_calls"))["content"] = content
        else:
            self._draft = None
            self.messages.append({"role": role, "content": content})

    def _turn(self, after: Sequence[str] = ()) -> dict[str, Any]:
        """The assistant message to add to; a new one if the current one already has one of the fields `after`."""
        if self._draft is None or any(self._draft.get(name) for name in after):
            self._draft = {"role": "assistant", "content": ""}
            self.messages.append(self._draft)
        return self._draft


def _content(value: Any, path: str) -> str | list[Mapping[str, Any]]:
    """Text, or a list of text and image parts. Raises InvalidRequest for files, since ignoring them would change the
    question."""
    if value is None or isinstance(value, str):
        return value or ""
    parts: list[Mapping[str, Any]] = []
    for index, part in enumerate(objects(value, path)):
        place = f"{path}[{index}]"
        kind = text_at(part, "type", place)
        if kind in TEXT_PARTS:
            parts.append({"type": "text", "text": text_at(part, "text", place)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": text_at(part, "refusal", place)})
        elif kind == "input_image":
            parts.append(image_part(part, place))
        elif kind in ("input_file", "input_audio"):
            raise InvalidRequest(f"`{place}`: this server takes text and images. Leave the {kind} out.", param=place)
    return parts


def _thought(item: Mapping[str, Any], path: str) -> str:
    """The text of a reasoning item: its content, else its sealed text, else its summary."""
    for name in ("content", "summary"):
        texts = [text_at(part, "text", f"{path}.{name}") for part in objects(item.get(name), f"{path}.{name}")]
        texts = [text for text in texts if name != "summary" or not is_progress(text)]
        if any(texts):
            return "\n".join(texts)
        sealed = text_at(item, "encrypted_content", path)
        if sealed and (thought := opened_reasoning(sealed)):
            return thought
    return ""


def _call(item: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    name = name_at(item, "name", path)
    if namespace := text_at(item, "namespace", path):
        name = _joined(namespace, name)
    arguments: Any = text_at(item, "arguments", path)
    if item.get("type") == "custom_tool_call":
        arguments = {"input": text_at(item, "input", path)}
    call_id = text_at(item, "call_id", path)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _joined(namespace: str, name: str) -> str:
    """The name under which the model sees a tool of a namespace."""
    return namespace + ("" if namespace.endswith(NAMESPACE_SEPARATOR) else NAMESPACE_SEPARATOR) + name


ToolTable = Mapping[str, tuple[Mapping[str, Any], tuple[str, str] | None, Mapping[str, Any]]]
"""The name that the model sees -> the tool, its (namespace, name) if it has a namespace, and the tool as sent."""


def _tools(body: Mapping[str, Any]) -> ToolTable:
    """Function tools, including those in namespaces. Tools that the vendor's servers run are skipped."""
    table: dict[str, tuple[Mapping[str, Any], tuple[str, str] | None, Mapping[str, Any]]] = {}
    for path, tool in _given_tools(body):
        if tool.get("type") == "function":
            name = name_at(tool, "name", path)
            table[name] = (function_tool(name, tool, "parameters", path), None, tool)
        elif tool.get("type") == "namespace":
            namespace = name_at(tool, "name", path)
            for place, inner in enumerate(objects(tool.get("tools"), f"{path}.tools")):
                if inner.get("type", "function") != "function":
                    continue
                inner_path = f"{path}.tools[{place}]"
                own = name_at(inner, "name", inner_path)
                name = _joined(namespace, own)
                table[name] = (function_tool(name, inner, "parameters", inner_path), (namespace, own), inner)
    return table


def _given_tools(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, tool) of the request's tools, then of those in `additional_tools` items of the input."""
    lists = [("tools", body.get("tools"))]
    given = body.get("input")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            lists.append((f"input[{index}].tools", item.get("tools")))
    for path, tools in lists:
        yield from ((f"{path}[{index}]", tool) for index, tool in enumerate(objects(tools, path)))


def _tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    choice = body.get("tool_choice")
    if choice is None:
        return ToolChoice()
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = name_at(choice, "name", "tool_choice")
        if namespace := text_at(choice, "namespace", "tool_choice"):
            name = _joined(namespace, name)
        check_named(name, tools, "tool_choice.name")
        return ToolChoice(ToolChoiceMode.NAMED, name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return allowed_choice(choice, tools)
    if isinstance(choice, dict):  # names a tool that only the vendor's servers run
        return ToolChoice()
    if choice not in ("auto", "none", "required"):
        raise wrong("tool_choice", "`auto`, `none`, `required` or an object that names a function")
    return ToolChoice(ToolChoiceMode(choice))
