"""What a program of a client shares with the others: its server, its tools, its report. Only the standard library."""

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from conversations import DEGREES, temperature

SERVER = os.environ["QUIRE_SERVER"]
URL = f"{SERVER}/v1"
MODEL = "script"
KEY = "unused"

called: list[str] = []
"""The cities for which the model called ``look_up`` in the present check."""


def look_up(city: str) -> str:
    """Return the temperature in a city."""
    called.append(city)
    return temperature(city)


def look_up_json(arguments: str) -> str:
    return look_up(**json.loads(arguments))


def tool_results(answer: Any) -> list[Any]:
    """Return the messages with the results of the calls in a message of Chat Completions."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": look_up_json(call.function.arguments)}
        for call in answer.tool_calls or []
    ]


def all_called() -> None:
    """Assert that the model called the tool for each city, in the script's order."""
    assert called == [*DEGREES], called


def report(checks: Iterable[Callable[[], Any]], *packages: str) -> None:
    """Run the checks and print one JSON object: the versions of the packages, and the error of each check or ""."""
    results = {}
    for check in checks:
        called.clear()
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()
    print(json.dumps({"versions": {name: version(name) for name in packages}, "results": results}))
