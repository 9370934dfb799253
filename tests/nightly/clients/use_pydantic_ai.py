"""pydantic-ai: agents over chat completions, Responses and Messages."""

from collections.abc import Callable
from typing import Any, Literal

from checks import KEY, MODEL, SERVER, URL, all_called, called, look_up, report
from conversations import AS_JSON, FINAL, GOODBYE, GREETING, HELLO, LOOKED_UP, NEXT, OBJECT, QUESTION, THANKS, WELCOME
from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunResultEvent, ModelSettings, NativeOutput, Tool, ToolOutput
from pydantic_ai.messages import PartDeltaEvent, TextPartDelta
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=URL, api_key=KEY)
MODELS: dict[str, Callable[[], Any]] = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=openai),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=openai),
    "messages": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=SERVER, api_key=KEY)),
}


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return look_up(city)


def temperature_in_rome(city: Literal["Rome"]) -> str:
    """Return the temperature in Rome."""
    return look_up(city)


def checks_of(api: str) -> list[Callable[[], Any]]:
    make = MODELS[api]

    async def second_turn() -> None:
        agent = Agent(make())
        first = await agent.run(GREETING)
        second = await agent.run(NEXT, message_history=first.all_messages())
        assert (first.output, second.output) == (HELLO, GOODBYE)

    async def tool_loop() -> None:
        agent = Agent(make(), tools=[temperature])
        first = await agent.run(QUESTION)
        all_called()
        second = await agent.run(THANKS, message_history=first.all_messages())
        assert (first.output, second.output) == (FINAL, WELCOME)

    async def stream() -> None:
        pieces: list[str] = []
        result: Any = None
        async with Agent(make(), tools=[temperature]).run_stream_events(QUESTION) as events:
            async for event in events:
                if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                    pieces.append(event.delta.content_delta)
                elif isinstance(event, AgentRunResultEvent):
                    result = event.result
        all_called()
        assert result.output == FINAL and FINAL.endswith(pieces[-1]) and len(pieces) > 1

    async def structured() -> None:
        tool, one_call = Tool(temperature_in_rome, name="temperature"), ModelSettings(parallel_tool_calls=False)
        if api != "messages":  # pydantic-ai has it for Anthropic's own models only
            native = await Agent(make(), output_type=NativeOutput(Weather)).run(AS_JSON)
            assert native.output == Weather(**OBJECT)
            helped = Agent(make(), tools=[tool], output_type=NativeOutput(Weather), model_settings=one_call)
            assert (await helped.run(LOOKED_UP)).output == Weather(**OBJECT)
            assert called == ["Rome"]
        agent = Agent(make(), output_type=ToolOutput(Weather), model_settings=one_call)
        assert (await agent.run(AS_JSON)).output == Weather(**OBJECT)

    checks: list[Callable[[], Any]] = [second_turn, tool_loop, stream, structured]
    for check in checks:
        check.__name__ = f"{api}_{check.__name__}"
    return checks


report([check for api in MODELS for check in checks_of(api)], "pydantic-ai-slim")
