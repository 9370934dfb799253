"""Clients of Messages and Responses against ``quire serve``: second turns, and loops of three calls."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served import Served

PLACE = {"type": "object", "properties": {"place": {"type": "string", "enum": ["Rome", "Bonn"]}}, "required": ["place"]}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": False}
NUM_CALLS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served()
    yield served
    assert served.stop() == 0
    assert not any("Traceback" in line for line in served.log), "".join(served.log)


@pytest.mark.slow
class TestOpenAI:
    @pytest.fixture
    def client(self, server: Served) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            yield client

    @pytest.mark.parametrize("stored", [False, True])
    def test_loop_of_calls(self, client: openai.OpenAI, stored: bool) -> None:
        items: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        previous: Any = openai.omit
        for choice in ["required"] * NUM_CALLS + ["none"]:
            with client.responses.stream(
                model="quire-demo",
                input=items,
                tools=[FUNCTION],
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                previous_response_id=previous,
                store=stored,
                max_output_tokens=60,
            ) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
            items = [] if stored else items + response.output
            previous = response.id if stored else openai.omit
            for item in response.output:
                if item.type == "function_call":
                    assert json.loads(item.arguments)["place"] in ("Rome", "Bonn")
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "sunny"})
        assert response.output_text
        if stored:
            assert client.responses.retrieve(response.id).output_text == response.output_text
            client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response.id)

    def test_conversation_is_found_in_the_prefix_cache(self, client: openai.OpenAI) -> None:
        text = "Please tell me a rather long story about a green garden." * 3
        first = client.responses.create(model="quire-demo", input=text, max_output_tokens=30)
        second = client.responses.create(
            model="quire-demo", input="Go on.", previous_response_id=first.id, max_output_tokens=2
        )
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16

    def test_openai_agents(self, server: Served) -> None:
        agents = pytest.importorskip("agents")
        called: list[str] = []

        @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
        def weather(place: str) -> str:
            called.append(place)
            return "sunny"

        async def run() -> Any:
            agents.set_tracing_disabled(True)
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
                model = agents.OpenAIResponsesModel("quire-demo", client)
                settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
                agent = agents.Agent(name="a", model=model, tools=[weather], model_settings=settings)
                return await agents.Runner.run(agent, "How is the weather?")

        assert asyncio.run(run()).final_output
        assert called


@pytest.mark.slow
class TestAnthropic:
    @pytest.fixture
    def client(self, server: Served) -> Iterator[Any]:
        anthropic = pytest.importorskip("anthropic")
        with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
            yield client

    @pytest.mark.parametrize("streamed", [False, True])
    def test_loop_of_calls(self, client: Any, streamed: bool) -> None:
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        tools = [{"name": "weather", "input_schema": PLACE}]
        for choice in ["any"] * NUM_CALLS + ["none"]:
            fields = {"model": "quire-demo", "max_tokens": 60, "messages": messages, "tools": tools}
            fields["tool_choice"] = {"type": choice}
            if streamed:
                with client.messages.stream(**fields) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**fields)
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert (len(calls) > 0) == (choice == "any")
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        assert answer.content[0].text

    def test_cached_tokens_are_reported_at_the_start_of_a_stream(self, client: Any) -> None:
        text = "You are a rather helpful agent that tells long stories." * 3
        for version in (1, 2):
            header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version}; cch=0000{version};"}
            with client.messages.stream(
                model="quire-demo",
                max_tokens=2,
                system=[header, {"type": "text", "text": text}],
                messages=[{"role": "user", "content": "Go on."}],
            ) as stream:
                usage = next(event for event in stream if event.type == "message_start").message.usage
        assert usage.cache_read_input_tokens >= 16
        assert usage.input_tokens <= 16
