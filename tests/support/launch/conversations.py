"""The conversations that clients hold with a script checkpoint, for both sides: the model's answers, and the tools.

A text in the result of a tool call selects the next answer. So the model gives it only if the client sent the result
back, and all earlier answers too, because these are counted.
"""

import json

DEGREES = {"Rome": 21, "Bonn": 14, "Oslo": 3}
QUESTION = "Which is the warmest of Rome, Bonn and Oslo? Look them up."
FINAL = "Rome is the warmest: 21 degrees, before Bonn with 14 and Oslo with 3."
THANKS = "Thank you."
WELCOME = "You are welcome; ask again."

GREETING = "Please say hello."
HELLO = "Hello! How may I help?"
NEXT = "And now goodbye."
GOODBYE = "Goodbye, until next time."

AS_JSON = "Give Rome's weather as JSON."
AS_FENCE = "Give Rome's weather in a fenced block."
AS_CALLS = "Give Rome's weather by two calls."
"""A question for each form in which a client may ask for an object."""
LOOKED_UP = "Look up Rome's temperature, then give the weather."
"""A question for an object by a schema, with a tool that the model calls first."""
OBJECT = {"city": "Rome", "degrees": 21}
"""Its schema should allow nothing else: a grammar makes the model write tokens that are not in its script."""


def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return f"It is {DEGREES[city]} degrees in {city}."


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "temperature", "description": "Return the temperature in a city.", "parameters": PARAMETERS}
WEATHER = {
    "type": "object",
    "properties": {"city": {"const": "Rome"}, "degrees": {"const": 21}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def call(name: str, arguments: dict[str, object]) -> str:
    """Write a call in the format ``hermes``."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripts() -> dict[str, list[str]]:
    """Return the answers by the word that selects them (``script_checkpoint.py``)."""
    rome, bonn, oslo = (call("temperature", {"city": city}) for city in DEGREES)
    return {
        LOOKED_UP: [rome, json.dumps(OBJECT)],
        "3 degrees in Oslo": ["", "", "", FINAL, WELCOME],
        "14 degrees in Bonn": ["", "", f"Now the last one.\n{oslo}"],
        "21 degrees in Rome": ["", bonn],
        "warmest": [f"<think>\nRome comes first.\n</think>\n\n{rome}"],
        GREETING: [HELLO, GOODBYE],
        AS_JSON: [json.dumps(OBJECT)] * 2,
        AS_FENCE: [f"```json\n{json.dumps(OBJECT)}\n```"] * 2,
        AS_CALLS: ["\n".join([call("Weather", dict(OBJECT))] * 2)],
    }
