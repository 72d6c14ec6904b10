"""Nested fields, and those that several dialects share. As in `fields`, absent or null means the default. Errors name
the whole path, so that the user knows which of a hundred messages to correct."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from parkd.errors import InvalidRequest
from parkd.proxy.dialects import fields
from parkd.types import CacheHints, CacheMode, FormKind, ImageData, TextForm, ToolChoice, ToolChoiceMode

SEND_DATA = "Send the image itself, as data:image/png;base64,... or in the dialect's base64 form."
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
CACHE_MODE_HEADER = "x-parkd-cache-mode"
OPENAI_TTL_S = {"30m": 1800.0, "12h": 43200.0}


def wrong(path: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` must be {wanted}.", param=path)


def text_at(holder: Mapping[str, Any], name: str, path: str) -> str:
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", "a string")
    return value


def name_at(holder: Mapping[str, Any], name: str, path: str) -> str:
    """A required string that must not be empty."""
    value = text_at(holder, name, path)
    if not value:
        raise wrong(f"{path}.{name}", "a string that is not empty")
    return value


def object_at(holder: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(f"{path}.{name}", "an object")
    return value


def objects(value: Any, path: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects; empty if `value` is None."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(path, "a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{path}[{index}]", "an object")
    return value


def image_part(part: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The image part of a message, from any dialect, in the form that turns use. Raises InvalidRequest if it is not an
    image. An image that would have to be fetched gets a `refusal`, with which the turn refuses it later."""
    name = "source" if "source" in part else "image_url"
    source, where = part.get(name), f"{path}.{name}"
    if part.get("file_id") or (isinstance(source, dict) and source.get("type") == "file"):
        return _image(path, refusal=f"names a stored file, and this server keeps none. {SEND_DATA}")
    if isinstance(source, dict) and source.get("type") == "base64":
        return _image(path, name_at(source, "data", where))
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url:
        raise wrong(where, "an image: a data URL, or base64 data")
    head = _DATA_URL.match(url)
    if head is not None:
        return _image(path, url[head.end() :])
    if url.startswith("data:"):
        return _image(path, refusal=f"is a data URL without base64. {SEND_DATA}")
    return _image(path, refusal=f"is an address, and this server fetches nothing. {SEND_DATA}")


def _image(path: str, data: str = "", *, refusal: str = "") -> Mapping[str, Any]:
    return {"type": "image", "image": ImageData(data, path, refusal)}


def function_tool(name: str, tool: Mapping[str, Any], schema_name: str, path: str) -> Mapping[str, Any]:
    """A tool in the form that chat templates expect. `schema_name` is the dialect's name for the schema field."""
    function: dict[str, Any] = {"name": name}
    if description := text_at(tool, "description", path):
        function["description"] = description
    function["parameters"] = object_at(tool, schema_name, path)
    return {"type": "function", "function": function}


def strict_names(tools: Iterable[tuple[str, Mapping[str, Any]]]) -> frozenset[str]:
    """Names of the tools that are `strict`, of (name, holder of the field)."""
    return frozenset(name for name, holder in tools if holder.get("strict") is True)


def check_named(name: str, tools: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raises InvalidRequest if the tool that must be called is not among `tools`."""
    if name not in {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(f"`{path}` names the tool {name!r}, which is not in `tools`.", param=path)


def refuse_functions(body: Mapping[str, Any]) -> None:
    """Refuses the chat API's older form of tools. If it were ignored, the model would not know of the functions, and
    the client would look for the call in another place of the answer. Raises InvalidRequest."""
    advice = 'Send `tools`, each {"type": "function", "function": ...}, and `tool_choice`.'
    for name, harmless in (("functions", ([],)), ("function_call", ("", {}, "auto", "none"))):
        if body.get(name) not in (None, *harmless):
            raise InvalidRequest(f"`{name}` is an older form that is not supported. {advice}", param=name)
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        path = f"messages[{index}]"
        if message.get("role") == "function":
            raise wrong(f"{path}.role", "`tool` for what a function returned, with the call's id in `tool_call_id`")
        if message.get("function_call") and not message.get("tool_calls"):
            raise InvalidRequest(
                f"`{path}.function_call` is an older form. Send the call in `tool_calls`.",
                param=f"{path}.function_call",
            )


Form = tuple[Mapping[str, Any] | None, TextForm | None]
"""A JSON schema, or another form that the answer must have; at most one."""
FORM_NAMES = {"json": "json", "json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
GUIDED = ("json", "regex", "choice", "grammar")
MOST_CHOICES = 4096
MOST_FORM_CHARACTERS = 64 * 1024


def asked_form(body: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> Form:
    """The form that the answer must have, by the dialect's own format `wanted` at `path`, or by the fields of
    llama-server, vLLM and SGLang, which all dialects take. Raises InvalidRequest: if one were ignored, the answer would
    not have the form that the client relies on."""
    found = [_own_form(wanted, path)]
    if path != "response_format":
        found.append(_own_form(fields.obj(body, "response_format"), "response_format"))
    outputs = fields.obj(body, "structured_outputs")
    found += [_named_form(outputs.get(name), name, f"structured_outputs.{name}") for name in GUIDED]
    if outputs.get("structural_tag") is not None:
        raise InvalidRequest("`structured_outputs.structural_tag` is not supported.", param="structured_outputs")
    if outputs.get("json_object"):
        found.append(({"type": "object"}, None))
    found += [_named_form(body.get(f"guided_{name}"), name, f"guided_{name}") for name in GUIDED]
    found += [_named_form(body.get(name), FORM_NAMES[name], name) for name in ("json_schema", "regex", "grammar")]
    forms = [form for form in found if form != (None, None)]
    if len(forms) > 1:
        raise InvalidRequest("The request asks for several forms of its answer. Ask for one.", param=path)
    return forms[0] if forms else (None, None)


def _own_form(wanted: Mapping[str, Any], path: str) -> Form:
    """The form of an OpenAI or Anthropic response format. The schema is in it, or in its `json_schema`."""
    kind = wanted.get("type", "text")
    if kind == "text":
        return None, None
    if kind == "grammar":
        return _named_form(name_at(wanted, "grammar", path), "grammar", f"{path}.grammar")
    schema = wanted.get("schema")
    if schema is None:
        schema = object_at(wanted, "json_schema", path).get("schema")
    if kind == "json_object" and schema is None:
        return {"type": "object"}, None
    if kind not in ("json_object", "json_schema"):
        raise wrong(f"{path}.type", "`text`, `json_object`, `json_schema` or `grammar`")
    if not isinstance(schema, dict):
        raise wrong(f"{path}.schema", "a JSON schema")
    return schema, None


def _named_form(value: Any, name: str, path: str) -> Form:
    if value is None or (value == "" and name != "json"):
        return None, None
    if name == "json":
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError:
                raise wrong(path, "a JSON schema") from None
        if not isinstance(value, dict):
            raise wrong(path, "a JSON schema")
        return value, None
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise wrong(path, "a list of strings")
        if len(value) > MOST_CHOICES:
            raise wrong(path, f"a list of at most {MOST_CHOICES} strings")
        return None, TextForm(FormKind.CHOICE, tuple(value), path)
    if not isinstance(value, str) or len(value) > MOST_FORM_CHARACTERS:
        raise wrong(path, f"a string of at most {MOST_FORM_CHARACTERS} characters")
    return None, TextForm(FormKind(name), value, path)


def allowed_names(tools: Sequence[Mapping[str, Any]], given: Any, path: str) -> frozenset[str]:
    """The names in a list of allowed tools, in the form of chat or of Responses. Tools that only the vendor's servers
    run are skipped. Raises InvalidRequest for one that is not in `tools`."""
    names: set[str] = set()
    for index, tool in enumerate(objects(given, path)):
        place = f"{path}[{index}]"
        if tool.get("type", "function") == "function":
            holder = object_at(tool, "function", place) or tool
            names.add(name_at(holder, "name", place))
            check_named(name_at(holder, "name", place), tools, f"{place}.name")
    return frozenset(names)


def allowed_choice(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """A choice of type `allowed_tools`, as chat nests it or as Responses has it."""
    nested = object_at(choice, "allowed_tools", "tool_choice")
    holder, path = (nested, "tool_choice.allowed_tools") if nested else (choice, "tool_choice")
    mode = text_at(holder, "mode", path) or "auto"
    if mode not in ("auto", "required"):
        raise wrong(f"{path}.mode", "`auto` or `required`")
    names = allowed_names(tools, holder.get("tools"), f"{path}.tools")
    if mode == "required" and not names:
        raise wrong(f"{path}.tools", "a list with at least one function of `tools`")
    return ToolChoice(ToolChoiceMode(mode), allowed=names)


def continues(messages: Sequence[Mapping[str, Any]], choice: ToolChoice, form: Form) -> bool:
    """Whether the last message is the beginning of the answer: the assistant's, with text alone. Never where the
    answer must have a form or call a tool, which only a whole answer can."""
    last = messages[-1]
    forced = choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    whole = bool(last.get("tool_calls") or last.get("reasoning_content"))
    return last["role"] == "assistant" and not whole and not forced and form == (None, None)


def cache_hints(
    body: Mapping[str, Any], headers: Mapping[str, str], *, min_retention_s: float | None = None
) -> CacheHints:
    """The request's wishes for caching and retention. The header takes precedence over `cache_prompt`."""
    asked = headers.get(CACHE_MODE_HEADER)
    if asked is None:
        mode = CacheMode.USE if fields.flag(body, "cache_prompt", default=True) else CacheMode.OFF
    elif asked in {known.value for known in CacheMode}:
        mode = CacheMode(asked)
    else:
        raise wrong(CACHE_MODE_HEADER, "`use`, `read` or `off`")
    diagnostics, options = fields.obj(body, "diagnostics"), fields.obj(body, "prompt_cache_options")
    earlier = text_at(diagnostics, "previous_message_id", "diagnostics")
    earlier = earlier or text_at(options, "comparison_response_id", "prompt_cache_options")
    if min_retention_s is None:
        min_retention_s = OPENAI_TTL_S.get(str(options.get("ttl")))
    return CacheHints(
        mode,
        min_retention_s,
        group=fields.text(body, "prompt_cache_key") or None,
        salt=fields.text(body, "cache_salt") or None,
        compare_to=earlier or None,
        wants_diagnosis="diagnostics" in body or "prompt_cache_options" in body,
    )
