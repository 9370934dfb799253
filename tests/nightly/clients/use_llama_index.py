"""llama-index: its class for OpenAI-like servers, and its agents."""

from typing import Any, Literal

from checks import KEY, MODEL, URL, all_called, look_up, report
from conversations import AS_JSON, FINAL, GOODBYE, GREETING, HELLO, NEXT, OBJECT, QUESTION, THANKS, WELCOME
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return look_up(city)


TOOL = FunctionTool.from_defaults(temperature)


def model(**fields: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        **fields,
    )


def chat_second_turn() -> None:
    messages = [ChatMessage(role="user", content=GREETING)]
    first = model().chat(messages).message
    second = model().chat([*messages, first, ChatMessage(role="user", content=NEXT)]).message
    assert (first.content, second.content) == (HELLO, GOODBYE)


def chat_tool_loop() -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    while True:
        answer = model().chat_with_tools([TOOL], chat_history=messages)
        messages.append(answer.message)
        calls = model().get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        if not calls:
            break
        for call in calls:
            result = str(TOOL(**call.tool_kwargs))
            fields = {"tool_call_id": call.tool_id, "name": call.tool_name}
            messages.append(ChatMessage(role="tool", content=result, additional_kwargs=fields))
    all_called()
    messages.append(ChatMessage(role="user", content=THANKS))
    second = model().chat_with_tools([TOOL], chat_history=messages).message
    assert (answer.message.content, second.content) == (FINAL, WELCOME)


async def chat_stream() -> None:
    """An agent, with a memory that keeps the conversation."""
    agent = FunctionAgent(tools=[TOOL], llm=model())
    memory = ChatMemoryBuffer.from_defaults(token_limit=10_000)
    for question, expected in ((QUESTION, FINAL), (THANKS, WELCOME)):
        running = agent.run(question, memory=memory)
        pieces = [event.delta async for event in running.stream_events() if isinstance(event, AgentStream)]
        assert str(await running) == expected and "".join(pieces).endswith(expected) and len(pieces) > 1
    all_called()


def chat_structured() -> None:
    found = model(should_use_structured_outputs=True).as_structured_llm(Weather).complete(AS_JSON)
    assert found.raw == Weather(**OBJECT)
    by_call = model().as_structured_llm(Weather).complete(AS_JSON)
    assert by_call.raw == Weather(**OBJECT)


report(
    [chat_second_turn, chat_tool_loop, chat_stream, chat_structured], "llama-index-core", "llama-index-llms-openai-like"
)
