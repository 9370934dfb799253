"""instructor: every mode that it lists for OpenAI and for Anthropic, each asked twice."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
from checks import KEY, MODEL, SERVER, URL, report
from conversations import AS_CALLS, AS_FENCE, AS_JSON, OBJECT
from instructor import Mode
from instructor.v2.core.provider_specs import PROVIDER_SPECS
from instructor.v2.core.providers import Provider
from pydantic import BaseModel, model_validator

PROVIDERS: dict[Provider, tuple[Callable[..., Any], Any]] = {
    Provider.OPENAI: (instructor.from_openai, openai.OpenAI(base_url=URL, api_key=KEY)),
    Provider.ANTHROPIC: (instructor.from_anthropic, anthropic.Anthropic(base_url=SERVER, api_key=KEY)),
}
QUESTIONS = {Mode.MD_JSON: AS_FENCE, Mode.PARALLEL_TOOLS: AS_CALLS, Mode.ANTHROPIC_PARALLEL_TOOLS: AS_CALLS}
NUM_ANSWERS = 2


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


def check_of(provider: Provider, mode: Mode) -> Callable[[], None]:
    def check() -> None:
        wrap, inner = PROVIDERS[provider]
        client = wrap(inner, mode=mode)
        question = QUESTIONS.get(mode, AS_JSON)
        fields: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": question}]}
        if question == AS_CALLS:
            found = list(client.create(response_model=Iterable[Weather], **fields))
            assert found == [Weather(**OBJECT)] * 2, found
        else:
            _ask_twice(client, fields)

    api = "messages" if provider is Provider.ANTHROPIC else "responses" if "responses" in mode.value else "chat"
    check.__name__ = f"{api}_{mode.name}_structured"
    return check


def _ask_twice(client: Any, fields: Any) -> None:
    """The first answer is refused, so instructor sends it back together with the reason."""
    answers = 0

    class RefusedOnce(Weather):
        @model_validator(mode="after")
        def refuse_once(self) -> "RefusedOnce":
            nonlocal answers
            answers += 1
            if answers < NUM_ANSWERS:
                raise ValueError("look again")
            return self

    RefusedOnce.__name__ = "Weather"
    found = client.create(response_model=RefusedOnce, max_retries=NUM_ANSWERS, **fields)
    assert found.model_dump() == OBJECT and answers == NUM_ANSWERS


def modes(provider: Provider) -> list[Mode]:
    """Return the modes that this release lists, older names included."""
    spec = PROVIDER_SPECS[provider]
    return [*spec.supported_modes, *spec.legacy_modes]


report([check_of(provider, mode) for provider in PROVIDERS for mode in modes(provider)], "instructor")
