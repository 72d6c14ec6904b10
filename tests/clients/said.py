"""What a client puts together from an answer, streamed or whole, in each dialect.

Arguments of calls are text, but values where the dialect gives values: in Anthropic's, and in Ollama's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jiter

Said = tuple[str, str, list[tuple[str, Any]], str]
"""Thinking, text, calls (name, arguments as each dialect gives them) and how it ended."""


def datas(frames: bytes) -> list[Any]:
    lines = [line[6:] for line in frames.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_stream(frames: bytes) -> Said:
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for chunk in datas(frames):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thinking += delta.get("reasoning_content", "")
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            ended = choice["finish_reason"] or ended
    return thinking, text, [(name, arguments) for name, arguments in calls], ended


def chat_document(document: Mapping[str, Any]) -> Said:
    (choice,) = document["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"]


def responses_stream(frames: bytes) -> Said:
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for data in datas(frames):
        match data["type"]:
            case "response.reasoning_text.delta":
                thinking += data["delta"]
            case "response.output_text.delta":
                text += data["delta"]
            case "response.output_item.added" if data["item"]["type"] == "function_call":
                calls.append([data["item"]["name"], ""])
            case "response.function_call_arguments.delta":
                calls[-1][1] += data["delta"]
            case "response.completed" | "response.incomplete":
                ended = data["response"]["status"]
    return thinking, text, [(name, arguments) for name, arguments in calls], ended


def responses_document(document: Mapping[str, Any]) -> Said:
    thinking, text, calls = "", "", []
    for item in document["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            thinking += item["content"][0]["text"]
        else:
            text += item["content"][0]["text"]
    return thinking, text, calls, document["status"]


def messages_stream(frames: bytes) -> Said:
    """Arguments as Anthropic's SDK makes them of the pieces: what is whole of them."""
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for data in datas(frames):
        if data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
            calls.append([data["content_block"]["name"], ""])
        elif data["type"] == "message_delta":
            ended = data["delta"]["stop_reason"]
        elif data["type"] == "content_block_delta":
            delta = data["delta"]
            thinking += delta.get("thinking", "")
            text += delta.get("text", "")
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
    values = [(name, jiter.from_json((pieces or "{}").encode(), partial_mode=True)) for name, pieces in calls]
    return thinking, text, values, ended


def messages_document(document: Mapping[str, Any]) -> Said:
    blocks = document["content"]
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return thinking, text, calls, document["stop_reason"]


def ollama_stream(lines: bytes) -> Said:
    thinking, text, calls, ended = "", "", list[tuple[str, Any]](), ""
    for data in map(json.loads, lines.splitlines()):
        more, piece, called, ended = ollama_document(data)
        thinking, text, calls = thinking + more, text + piece, calls + called
    return thinking, text, calls, ended


def ollama_document(document: Mapping[str, Any]) -> Said:
    message = document["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("thinking", ""), message["content"], calls, document.get("done_reason", "")
