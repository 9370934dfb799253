"""Numbers in range that are too much together, at the edge of the vocabulary, or tiny."""

from typing import Any

import pytest
from abuse import COMPLETIONS, AbusedServer, assert_refused
from abused_app import AbusedApp

VOCAB = 1024


VOLUMES: list[tuple[dict[str, Any], str]] = [
    *[({"n": 128, "prompt_logprobs": k}, "prompt_logprobs") for k in (16, 20)],
    *[({"prompt": [[5] * 300] * 100, "n": 20, "prompt_logprobs": k}, "prompt_logprobs") for k in (6, 7, 20)],
    *[({"prompt": [[5]] * 2048, "max_tokens": 2000, "logprobs": k}, "logprobs") for k in (8, 15, 20)],
]


def test_products_out_of_range(app: AbusedApp) -> None:
    """Refused before any sequence is submitted."""
    for fields, param in VOLUMES:
        refused = app.post(COMPLETIONS, {"prompt": [5] * 2000, "max_tokens": 1, **fields})
        assert_refused(refused, 400, param, "must be at most")
    assert app.engine.added == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_last_token_id_and_the_next(server: AbusedServer, name: str) -> None:
    def given(token: int) -> Any:
        return {str(token): 1} if name == "logit_bias" else [token]

    assert server.complete(**{name: given(VOCAB - 1)}).status_code == 200
    for beyond in (VOCAB, VOCAB + 1, 2 * VOCAB, 10**6, 2**31 - 1):
        assert_refused(server.complete(**{name: given(beyond)}), 400, name, f"0 to {VOCAB - 1}")


TINY = ("5e-324", "1e-300", "1e-45", "1e-40", "1.2e-38", "1e-30", "1e-10", "1e-6")


@pytest.mark.full
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
def test_tiny_numbers(server: AbusedServer, name: str) -> None:
    """Accepted without a division by a number that underflowed to zero, also with large logits."""
    for value in TINY:
        for beside in ("", ', "logit_bias": {"5": 100, "6": -100}', ', "repetition_penalty": 0.01, "top_k": 3'):
            fields = f'"seed": 3, "logprobs": 2, "max_tokens": 3, "{name}": {value}{beside}'
            response = server.post(COMPLETIONS, content=f'{{"prompt": [5, 6, 7], {fields}}}'.encode())
            assert response.status_code == 200, response.text
            logprobs = response.json()["choices"][0]["logprobs"]["token_logprobs"]
            assert all(-10_000 < value <= 0 for value in logprobs), logprobs
