"""Three turns with a tool each, by the official SDKs. Arguments: address, key, `chat`, `responses` or `messages`. Run
against a proxy, which stands between them and parkd."""

import json
import sys

from anthropic import Anthropic
from openai import OpenAI

url, key, dialect = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
RESULT = "a/b holds three files"
asks = [f"What is in folder {turn}?" for turn in range(3)]
calls = []


def chat() -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
    messages: list = [{"role": "system", "content": "Look."}]
    for ask in asks:
        messages.append({"role": "user", "content": ask})
        while (
            message := client.chat.completions.create(model="parkd", messages=messages, tools=[tool]).choices[0].message
        ).tool_calls:
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                calls.append(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        assert message.content.strip() == "I found it.", message
        messages.append({"role": "assistant", "content": message.content})


def responses() -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    tool = {"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS}
    items: list = []
    for ask in asks:
        items.append({"role": "user", "content": ask})
        while True:
            response = client.responses.create(
                model="parkd", instructions="Look.", input=items, tools=[tool], store=False
            )
            made = [item for item in response.output if item.type == "function_call"]
            items += [item.model_dump(exclude_none=True) for item in response.output]
            if not made:
                break
            for call in made:
                calls.append(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        assert response.output_text.strip() == "I found it.", response


def messages() -> None:
    client = Anthropic(base_url=url, api_key=key)
    tool = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
    said: list = []
    for ask in asks:
        said.append({"role": "user", "content": ask})
        while True:
            answer = client.messages.create(model="parkd", max_tokens=500, system="Look.", messages=said, tools=[tool])
            said.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
            )
            made = [block for block in answer.content if block.type == "tool_use"]
            if not made:
                break
            calls.extend(block.input for block in made)
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT} for block in made]
            said.append({"role": "user", "content": results})
        assert answer.content[-1].text.strip() == "I found it.", answer


{"chat": chat, "responses": responses, "messages": messages}[dialect]()
assert calls == [{"path": "a/b", "depth": 2}] * 3, calls
