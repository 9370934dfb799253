"""The choice of beams: rules that can be worked out by hand. Equality with transformers: end_to_end/test_beams.py."""

import math
from typing import Any

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.features.beams.search import BeamChoice, BeamSearch

STOP = 9


def search(width: int, most: int = 4, **params: Any) -> BeamSearch:
    sampling = SamplingParams(use_beam_search=True, beam_width=width, max_tokens=most, **params)
    return BeamSearch(sampling, frozenset({STOP}), most)


def test_best_continuations_of_all_beams_are_kept() -> None:
    beams = search(2)
    assert beams.step([[(1, -1.0), (2, -2.0), (3, -3.0)]]) == BeamChoice([0, 0], [1, 2])
    # -1 - 2 = -3 and -1 - 4 = -5, beside -2 - 0.5 = -2.5 and -2 - 2 = -4
    assert beams.step([[(5, -2.0), (6, -4.0)], [(7, -0.5), (8, -2.0)]]) == BeamChoice([1, 0], [7, 5])
    assert beams.step([[(1, -9.0), (2, -9.5)], [(3, -1.0), (4, -1.5)]]) == BeamChoice([1, 1], [3, 4])
    assert beams.step([[(1, -1.0)], [(2, -1.0)]]) is None
    assert [found.tokens for found in beams.ended] == [[1, 5, 3, 1], [1, 5, 4, 2]]
    assert [found.logprob for found in beams.ended] == [-5.0, -5.5]
    assert [found.score for found in beams.ended] == [-5.0 / 4, -5.5 / 4]


def test_only_the_best_outputs_of_a_step_end() -> None:
    beams = search(1, early_stopping="never", length_penalty=0.0)
    assert beams.step([[(1, -1.0), (STOP, -1.5)]]) == BeamChoice([0], [1])
    assert not beams.ended, "the stop token was only the second best"
    assert beams.step([[(STOP, -0.1), (2, -3.0)]]) is None
    assert [(found.tokens, found.stop_reason) for found in beams.ended] == [([1, STOP], None)]


def test_own_stop_token_is_the_stop_reason() -> None:
    beams = search(1, stop_token_ids=[STOP])
    assert beams.step([[(STOP, -0.1), (2, -3.0)]]) is None
    assert beams.ended[0].stop_reason == STOP


def test_stop_token_before_min_tokens_continues() -> None:
    beams = search(1, min_tokens=1)
    assert beams.step([[(STOP, -0.1), (2, -3.0)]]) == BeamChoice([0], [STOP])
    assert beams.step([[(STOP, -0.1), (2, -3.0)]]) is None


def test_end_of_a_grammar_ends_an_output_before_min_tokens() -> None:
    beams = search(1, min_tokens=1, structured_outputs=StructuredOutputs(choice=["a"]))
    assert beams.step([[(STOP, 0.0), (2, -math.inf)]]) is None
    assert [found.tokens for found in beams.ended] == [[STOP]]


def test_excluded_tokens_are_never_chosen() -> None:
    beams = search(2)
    assert beams.step([[(1, -1.0), (2, -math.inf), (3, -math.inf)]]) == BeamChoice([0], [1])
    assert beams.step([[(1, -math.inf)]]) is None
    assert beams.ended == []
