"""Construction of the proposer that the configuration selects."""

import torch

from quire.kernels.cpu.native.library import load_native
from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.errors import ConfigError
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.drafts.draft_model import DraftModel, DraftModelProposer
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.drafts.ngram import NgramProposer
from quire.worker_proc.drafts.proposer import Proposer
from quire.worker_proc.drafts.rejection import RejectionSampler
from quire.worker_proc.drafts.suffix import SuffixProposer

METHODS = ("ngram", "suffix", "draft_model")


def make_proposer(
    config: EngineConfig, batch: InputBatch, device: torch.device, draft: DraftModel | None = None
) -> Proposer | None:
    """Return the proposer, or None without speculative decoding.

    Args:
        draft: the draft model, for method ``draft_model``.

    Raises:
        ConfigError: the settings are invalid or contradict each other.
    """
    chosen = config.speculative
    if chosen is None or not config.num_speculative_tokens:
        return None
    check_speculative(chosen)
    match chosen.method:
        case "ngram":
            lookup = chosen.prompt_lookup_min, chosen.prompt_lookup_max
            return NgramProposer(batch, *lookup, config.num_speculative_tokens, load_native())
        case "suffix":
            return SuffixProposer(batch, chosen.suffix_max_depth, chosen.suffix_max_cached_requests)
        case "draft_model":
            assert draft is not None, "make_proposer needs the loaded draft model for method draft_model"
            sampler = DraftSampler(batch, device, keeps=chosen.acceptance == "rejection")
            limits = config.num_speculative_tokens, config.max_num_batched_tokens
            return DraftModelProposer(draft, batch, device, *limits, sampler)
        case unknown:
            raise ValueError(unknown)


def make_rejection(config: EngineConfig, batch: InputBatch, proposer: Proposer | None) -> RejectionSampler | None:
    """Return the rejection sampler, or None if drafts are accepted by shared noise."""
    wanted = config.speculative is not None and config.speculative.acceptance == "rejection"
    if not wanted or not isinstance(proposer, DraftModelProposer):
        return None
    return RejectionSampler(batch, proposer.sampler)


def check_speculative(chosen: SpeculativeConfig) -> None:
    """Raise ConfigError if the settings are invalid or contradict each other."""
    if chosen.method not in METHODS:
        raise ConfigError(f"speculative method must be one of {', '.join(METHODS)} (got {chosen.method!r})")
    if chosen.acceptance not in ("shared_noise", "rejection"):
        raise ConfigError(f"speculative acceptance must be shared_noise or rejection (got {chosen.acceptance!r})")
    if chosen.acceptance == "rejection" and chosen.method != "draft_model":
        raise ConfigError(f"speculative acceptance rejection needs method draft_model (got {chosen.method})")
    if chosen.method == "ngram" and not 1 <= chosen.prompt_lookup_min <= chosen.prompt_lookup_max:
        raise ConfigError(
            "speculative: prompt_lookup_min must be between 1 and prompt_lookup_max "
            f"(got {chosen.prompt_lookup_min} and {chosen.prompt_lookup_max})"
        )
    if chosen.method == "suffix" and (chosen.suffix_max_depth < 1 or chosen.suffix_max_cached_requests < 0):
        raise ConfigError(
            "speculative: suffix_max_depth must be at least 1 and suffix_max_cached_requests at least 0 "
            f"(got {chosen.suffix_max_depth} and {chosen.suffix_max_cached_requests})"
        )
