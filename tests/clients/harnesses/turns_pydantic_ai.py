"""Run by pydantic-ai's own environment: three turns with a tool each. Arguments: address, key, `chat`, `responses` or
`messages`."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, key, dialect = sys.argv[1:]
if dialect == "messages":
    model = AnthropicModel("parkd", provider=AnthropicProvider(base_url=url, api_key=key))
else:
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[dialect]
    model = kind("parkd", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
agent = Agent(model, instructions="Look.")
calls = []


@agent.tool_plain
def look(path: str, depth: int = 1) -> str:
    """Looks."""
    calls.append((path, depth))
    return f"{path} holds three files"


async def watch(_context, events) -> None:
    async for _ in events:
        pass


async def main() -> None:
    history: list = []
    for turn in range(3):
        asked = f"What is in folder {turn}?"
        # With a handler the answer is streamed.
        result = await agent.run(asked, message_history=history, event_stream_handler=watch if turn % 2 else None)
        assert result.output.strip() == "I found it.", result.output
        history = result.all_messages()
    assert calls == [("a/b", 2)] * 3, calls


asyncio.run(main())
