"""openai-agents, over Responses (its default) and chat completions."""

from collections.abc import Callable
from typing import Any, Literal

import agents
import openai
from checks import KEY, MODEL, URL, all_called, called, look_up, report
from conversations import AS_JSON, FINAL, GOODBYE, GREETING, HELLO, LOOKED_UP, NEXT, OBJECT, QUESTION, THANKS, WELCOME
from pydantic import BaseModel

agents.set_tracing_disabled(True)
MODELS = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


@agents.function_tool
def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return look_up(city)


@agents.function_tool(name_override="temperature")
def temperature_in_rome(city: Literal["Rome"]) -> str:
    """Return the temperature in Rome."""
    return look_up(city)


def checks_of(api: str) -> list[Callable[[], Any]]:
    def agent(**fields: Any) -> Any:
        client = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
        return agents.Agent(name="a", model=MODELS[api](MODEL, client), **fields)

    async def second_turn() -> None:
        first = await agents.Runner.run(agent(), GREETING)
        asked = [*first.to_input_list(), {"role": "user", "content": NEXT}]
        second = await agents.Runner.run(agent(), asked)
        assert (first.final_output, second.final_output) == (HELLO, GOODBYE)

    async def tool_loop() -> None:
        first = await agents.Runner.run(agent(tools=[temperature]), QUESTION)
        all_called()
        asked = [*first.to_input_list(), {"role": "user", "content": THANKS}]
        second = await agents.Runner.run(agent(tools=[temperature]), asked)
        assert (first.final_output, second.final_output) == (FINAL, WELCOME)

    async def stream() -> None:
        result = agents.Runner.run_streamed(agent(tools=[temperature]), QUESTION)
        pieces = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        all_called()
        assert result.final_output == FINAL and len(pieces) > len(FINAL.split())

    async def structured() -> None:
        result = await agents.Runner.run(agent(output_type=Weather), AS_JSON)
        assert result.final_output == Weather(**OBJECT)
        one_call = agents.ModelSettings(parallel_tool_calls=False)
        helped = agent(output_type=Weather, tools=[temperature_in_rome], model_settings=one_call)
        assert (await agents.Runner.run(helped, LOOKED_UP)).final_output == Weather(**OBJECT)
        assert called == ["Rome"]

    checks: list[Callable[[], Any]] = [second_turn, tool_loop, stream, structured]
    for check in checks:
        check.__name__ = f"{api}_{check.__name__}"
    return checks


report([check for api in MODELS for check in checks_of(api)], "openai-agents")
