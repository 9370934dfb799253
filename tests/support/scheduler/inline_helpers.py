"""MaskHelpers that compute masks in the test's own process, when the test allows it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.structured.backend import GrammarBackend, Masks
from quire.scheduler_proc.structured.mask_maker import MaskMaker
from quire.scheduler_proc.structured.mask_messages import FromHelper, Grown, Started, ToHelper


class InlineHelper:
    """Implements ``helper_process.MaskHelper``. Messages wait while it is ``stopped``."""

    has_unsent = False

    def __init__(self, maker: "InlineHelpers", *, private: bool) -> None:
        config = maker.config
        self.private = private
        self.stopped = False
        self.is_dead = False
        self.works_on = 0
        self.messages: list[ToHelper] = []
        self.masks: Masks = np.zeros((config.max_num_seqs * 4, (config.model.vocab_size + 31) // 32), np.int32)
        self._maker = MaskMaker(maker.backend(), config, self.masks, cpu_clock=maker.cpu_clock)
        self._answers: list[FromHelper] = [Started(0)]

    def fileno(self) -> int:
        return -1

    def send(self, message: ToHelper) -> None:
        self.messages.append(message)
        self._answer()

    def receive(self) -> list[FromHelper]:
        self._answer()
        answers, self._answers = self._answers, []
        return answers

    def grow(self, num_bytes: int) -> None:
        self._answers.append(Grown(num_bytes))

    def close(self) -> None:
        self.is_dead = True

    def _answer(self) -> None:
        while self.messages and not self.stopped and not self.is_dead:
            for answers in self._maker.handle(self.messages.pop(0)):
                self._answers += answers


class InlineHelpers:
    """Implements ``helper_process.HelperMaker``.

    Attributes:
        opened: every helper that was opened.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Callable[[], GrammarBackend],
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.config, self.backend, self.cpu_clock = config, backend, cpu_clock
        self.opened: list[InlineHelper] = []

    def open(self, *, private: bool) -> Any:
        self.opened.append(InlineHelper(self, private=private))
        return self.opened[-1]

    def close(self) -> None:
        pass
