"""From the configuration to the proposer that it names."""

import torch

from quire.protocol.config import EngineConfig
from quire.worker_proc.drafts.proposer import Proposer
from quire.worker_proc.input_batch import InputBatch


def make_proposer(config: EngineConfig, batch: InputBatch, device: torch.device) -> Proposer | None:
    """The proposer, or None without speculation."""
    return None
