"""Run by openai-agents' own environment: three turns with a tool each. Arguments: address, key, `chat` or
`responses`."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)
calls = []


@function_tool
def look(path: str, depth: int = 1) -> str:
    """Looks."""
    calls.append((path, depth))
    return f"{path} holds three files"


async def main() -> None:
    url, key, dialect = sys.argv[1:]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[dialect]
    agent = Agent(name="Looker", instructions="Look.", tools=[look], model=kind(model="parkd", openai_client=client))
    history: list = []
    for turn in range(3):
        asked = [*history, {"role": "user", "content": f"What is in folder {turn}?"}]
        if turn % 2:
            result = Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked)
        assert result.final_output.strip() == "I found it.", result.final_output
        history = result.to_input_list()
    assert calls == [("a/b", 2)] * 3, calls


asyncio.run(main())
