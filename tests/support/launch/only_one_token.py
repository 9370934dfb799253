"""A plugin in a folder that only the process of the tests has on its path: a request may allow one token only."""

from typing import Any

from quire import AdapterLogitsProcessor


class Only(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, params: Any) -> None:
        if not isinstance(params.extra_args.get("only", 0), int):
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        token = params.extra_args.get("only")

        def process(output_token_ids: list[int], logits: Any) -> Any:
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return None if token is None else process
