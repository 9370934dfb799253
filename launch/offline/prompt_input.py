"""What callers of the offline API may give as prompts."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import plain_ints

PromptInput = str | list[int] | Mapping[str, Any]


def given_rows(prompt: Any) -> npt.NDArray[Any] | None:
    """Return the embeddings of ``{"prompt_embeds": tensor}``, of torch or numpy, or None for another prompt.

    Raises:
        InvalidRequest: it has other keys, or another value.
    """
    if not isinstance(prompt, Mapping) or "prompt_embeds" not in prompt:
        return None
    value, torch = prompt["prompt_embeds"], sys.modules.get("torch")  # a tensor exists only where it was imported
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float32 if value.dtype is torch.bfloat16 else value.dtype).numpy()
    if not isinstance(value, np.ndarray) or len(prompt) != 1:
        raise InvalidRequest('a prompt of embeddings must be {"prompt_embeds": tensor}', "prompt_embeds")
    return value


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
            text = 'a prompt must be {"prompt": str}, {"prompt_token_ids": [...]} or {"prompt_embeds": tensor}'
            raise InvalidRequest(text, "prompt")
        prompt = prompt[keys.pop()]
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list):
        raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
    return plain_ints(prompt) if isinstance(prompt, list) else prompt
