"""langchain-openai over chat completions and Responses, langchain-anthropic over Messages, and agents of langgraph."""

from collections.abc import Callable
from typing import Any, Literal

from checks import KEY, MODEL, SERVER, URL, all_called, called, look_up, report
from conversations import AS_JSON, FINAL, GOODBYE, GREETING, HELLO, LOOKED_UP, NEXT, OBJECT, QUESTION, THANKS, WELCOME
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

MODELS: dict[str, Callable[[], Any]] = {
    "chat": lambda: ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0),
    "responses": lambda: ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, use_responses_api=True),
    "messages": lambda: ChatAnthropic(model=MODEL, base_url=SERVER, api_key=KEY, max_tokens=300, max_retries=0),
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome"]
    degrees: Literal[21]


@tool
def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return look_up(city)


@tool("temperature")
def temperature_in_rome(city: Literal["Rome"]) -> str:
    """Return the temperature in Rome."""
    return look_up(city)


def checks_of(api: str) -> list[Callable[[], Any]]:
    make = MODELS[api]

    def second_turn() -> None:
        model = make()
        first = model.invoke([HumanMessage(GREETING)])
        second = model.invoke([HumanMessage(GREETING), first, HumanMessage(NEXT)])
        assert (first.text, second.text) == (HELLO, GOODBYE)

    def tool_loop() -> None:
        model, messages = make().bind_tools([temperature]), [HumanMessage(QUESTION)]
        while (answer := model.invoke(messages)).tool_calls:
            messages += [answer, *(temperature.invoke(call) for call in answer.tool_calls)]
        all_called()
        second = model.invoke([*messages, answer, HumanMessage(THANKS)])
        assert (answer.text, second.text) == (FINAL, WELCOME)

    def stream() -> None:
        """An agent of langchain whose conversation is kept by langgraph."""
        agent = create_agent(make(), [temperature], checkpointer=InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "1"}}
        for question, expected in ((QUESTION, FINAL), (THANKS, WELCOME)):
            asked: Any = {"messages": [HumanMessage(question)]}
            pieces = [
                piece.text
                for piece, _ in agent.stream(asked, thread, stream_mode="messages")
                if piece.type == "AIMessageChunk"
            ]
            assert "".join(pieces).endswith(expected) and len(pieces) > 1
        all_called()

    def langgraph_tool_loop() -> None:
        model = make().bind_tools([temperature])

        def call_model(state: MessagesState) -> Any:
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", call_model)
        graph.add_node("tools", ToolNode([temperature]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        asked: Any = {"messages": [HumanMessage(QUESTION)]}
        first = graph.compile().invoke(asked)
        all_called()
        asked = {"messages": [*first["messages"], HumanMessage(THANKS)]}
        second = graph.compile().invoke(asked)
        assert [state["messages"][-1].text for state in (first, second)] == [FINAL, WELCOME]

    def structured() -> None:
        for method in ("function_calling", "json_schema", "json_mode"):
            if method == "json_mode" and api == "messages":
                continue
            found = make().with_structured_output(Weather, method=method).invoke(AS_JSON)
            assert found == Weather(**OBJECT), method
        if api != "messages":  # langchain has it for Anthropic's own model names only
            one_call = make().model_copy(update={"model_kwargs": {"parallel_tool_calls": False}})
            agent = create_agent(one_call, [temperature_in_rome], response_format=ProviderStrategy(Weather))
            state = agent.invoke({"messages": [("user", LOOKED_UP)]})
            assert state["structured_response"] == Weather(**OBJECT) and called == ["Rome"]

    checks: list[Callable[[], Any]] = [second_turn, tool_loop, stream, langgraph_tool_loop, structured]
    for check in checks:
        check.__name__ = f"{api}_{check.__name__}"
    return checks


report(
    [check for api in MODELS for check in checks_of(api)],
    *("langchain", "langchain-openai", "langchain-anthropic", "langgraph"),
)
