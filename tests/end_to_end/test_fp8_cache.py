"""The accuracy loss of an 8-bit KV cache is bounded."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import make_checkpoint
from inprocess import InProcessEngine

PROMPTS = [[5 + i, *range(7, 30 + 3 * i)] for i in range(8)]

TOLERANCE = {"float8_e4m3fn": 0.12, "float8_e5m2": 0.25}
"""Root mean square difference of the best tokens' log probabilities: three and two bits of mantissa, on random weights
whose logits have a deviation of about 4."""


def _best(folder: Path, kv_cache_dtype: str, native: str, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.float32]:
    """Return the best log probability after each prompt, whose last chunk reads the cache of the others."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    engine = InProcessEngine(folder, kv_cache_dtype=kv_cache_dtype, long_prefill_token_threshold=7)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, max_tokens=1, logprobs=1)
    answers = engine.run()
    values = [np.frombuffer(answers[str(index)].logprobs[0], np.float32)[0] for index in range(len(PROMPTS))]
    return np.array(values, np.float32)


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize("kv_cache_dtype", TOLERANCE)
def test_log_probabilities_stay_close(
    kv_cache_dtype: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    exact = _best(tmp_path, "float32", native, monkeypatch)
    rounded = _best(tmp_path, kv_cache_dtype, native, monkeypatch)
    difference = float(np.sqrt(np.square(exact - rounded).mean()))
    assert 0 < difference < TOLERANCE[kv_cache_dtype]
