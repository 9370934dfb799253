"""Logits processors as a user would write them, correct and faulty; loaded as ``processor_plugins:Name``."""

from collections.abc import Callable

import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, apply_update
from quire.protocol.request.sampling_params import SamplingParams

State = tuple[SamplingParams, list[int], list[int]]


class RowPlugin(LogitsProcessor):
    """Keeps parameters, prompt and live output of the rows that enable it by ``extra_args``."""

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, State] = {}

    def wants(self, params: SamplingParams) -> bool:
        return True

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        apply_update(self.rows, batch_update, lambda *told: told if self.wants(told[0]) else None)


class AddText(RowPlugin):
    """Adds to the logit of token ``t`` its count in prompt and output; the result is wrong if those lists are not
    exact."""

    def wants(self, params: SamplingParams) -> bool:
        return "add_text" in params.extra_args

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (_, prompt, output) in self.rows.items():
            logits[row] += torch.bincount(torch.tensor(prompt + output), minlength=logits.shape[1])
        return logits


class Lengths(RowPlugin):
    """Records the output lengths at each call, under ``extra_args["name"]``."""

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(config, device, is_pin_memory)
        self.seen: dict[str, list[int]] = {}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for params, _, output in self.rows.values():
            self.seen.setdefault(str(params.extra_args["name"]), []).append(len(output))
        return logits


class Breaks(RowPlugin):
    """Does what a request's ``extra_args["break"]`` names, and adds 1 to the logit of token 0 of every row."""

    def wants(self, params: SamplingParams) -> bool:
        if params.extra_args.get("break") == "update":
            raise KeyError("secret")
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (params, _, output) in self.rows.items():
            logits[row, 0] += 1.0
            if len(output) < int(params.extra_args.get("from", 0)):  # type: ignore[arg-type]
                continue
            match params.extra_args.get("break"):
                case "raise":
                    logits.fill_(5.0)
                    raise ZeroDivisionError("/home/secret")
                case "forget":
                    self.rows.clear()
                    raise ZeroDivisionError
                case "nan":
                    logits[row, 1] = torch.nan
                case "inf":
                    logits[row, 1] = torch.inf
                case "neighbours":
                    logits[:] = torch.nan
                case "nothing":
                    logits[row] = -torch.inf
                case "shape":
                    return logits[:, 1:]
                case "dtype":
                    return logits.double()
                case "none":
                    return None  # type: ignore[return-value]
        return logits


class RefusesToServe(LogitsProcessor):
    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise OSError("no model of mine")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...


class Halve(RowPlugin):
    """Argmax-invariant: halves the logits of requests that enable it."""

    @classmethod
    def uses(cls, sampling_params: SamplingParams) -> bool:
        return "halve" in sampling_params.extra_args

    def wants(self, params: SamplingParams) -> bool:
        return "halve" in params.extra_args

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            logits[row] *= 0.5
        return logits


class Prefers(AdapterLogitsProcessor):
    """Adds 50 to the logit of token ``extra_args["prefers"]`` plus the output's length, modulo the vocabulary."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        match sampling_params.extra_args.get("prefers", 0):
            case bool():
                raise TypeError("no boolean")
            case int():
                return
            case other:
                raise ValueError(f"prefers must be a token id, not {other!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        wanted = params.extra_args.get("prefers")
        if wanted is None:
            return None
        assert isinstance(wanted, int)

        def prefer(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[(wanted + len(output)) % len(logits)] += 50.0
            return logits

        return prefer


NOT_A_CLASS = Prefers.apply


class NotAProcessor:
    pass
