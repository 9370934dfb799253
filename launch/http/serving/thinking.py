"""Whether an answer begins with thinking, as the engine decides it from the same tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.launch.text.text_in import TextIn
from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.thinking import Marker, ThinkingState


@dataclass(frozen=True, slots=True)
class Thinking:
    """The engine's markers; ``end_text`` as the answer spells it. All empty where there are none."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    end_text: str = ""

    @classmethod
    def of(cls, config: EngineConfig, text_in: TextIn) -> "Thinking":
        start, end = config.thinking_start_token_ids, config.thinking_end_token_ids
        if not start or not end:
            return cls()
        return cls(tuple(start), tuple(end), text_in.decode(end, skip_special_tokens=False))

    def end_before_answer(self, prompt: npt.NDArray[np.int32], params: SamplingParams) -> str:
        """What ends the thinking that comes before a constrained answer; empty where there is none.

        There is where the prompt leaves thinking open, or a budget says that a first thought is to come.
        """
        if not self.end_text:
            return ""
        ids = prompt.tolist()
        opened = ThinkingState(self.start, self.end, ids).is_open
        awaited = params.thinking_token_budget is not None and Marker(self.end).last_in(ids) < 0
        return self.end_text if opened or awaited else ""
