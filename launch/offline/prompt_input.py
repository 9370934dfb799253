"""What callers of the offline API may give as prompts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import plain_ints

PromptInput = str | list[int] | Mapping[str, Any]


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt, and not a list of prompts."""
    if isinstance(prompts, str | Mapping | np.ndarray):
        return True
    return isinstance(prompts, list) and bool(prompts) and type(plain_ints(prompts[:1])[0]) in (int, bool)


def plain_prompt(prompt: Any) -> str | list[int]:
    """Return a prompt as text or as a list of ids.

    Raises:
        InvalidRequest: it is neither of them, nor an object with one.
    """
    if isinstance(prompt, Mapping):
        keys = set(prompt) & {"prompt", "prompt_token_ids"}
        if len(prompt) != 1 or not keys:
            raise InvalidRequest('a prompt must be {"prompt": str} or {"prompt_token_ids": [...]}', "prompt")
        prompt = prompt[keys.pop()]
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list):
        raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
    return plain_ints(prompt) if isinstance(prompt, list) else prompt
