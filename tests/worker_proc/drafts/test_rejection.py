"""Rejection sampling: the text's distribution is the model's, with any draft model."""

import numpy as np
import pytest
import torch
from draft_batches import DraftBatch

from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.drafts.rejection import RejectionSampler
from quire.worker_proc.sampling.accept import accept_drafts

CPU = torch.device("cpu")
VOCAB = 5
ROWS = 8_000


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return model and draft model, as logits that depend on the previous token: ``[VOCAB, VOCAB]`` each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, generator=generator) * 1.5, torch.randn(VOCAB, VOCAB, generator=generator) * 1.5


def two_tokens(model: torch.Tensor, draft: torch.Tensor, **sampling: object) -> tuple[np.ndarray, float]:
    """Generate the first two tokens after token 0 of many rows, by two drafts and their verification: ``[rows, 2]``.

    Rows whose first draft was rejected draft again, as the next step would. Also how many drafts were accepted.
    """
    rows = DraftBatch(ROWS, 4)
    rows.change([], {handle: [0] for handle in range(ROWS)}, temperature=1.0, **sampling)
    sampler = DraftSampler(rows.batch, CPU, keeps=True)
    rejection = RejectionSampler(rows.batch, sampler)
    found = np.full((ROWS, 2), -1)
    judged = accepted_drafts = 0
    going, last = np.arange(ROWS), np.zeros(ROWS, np.int64)
    while len(going):
        at = (found[going, 0] >= 0).astype(np.int64)  # number of tokens of each row
        sampler.start()
        first = sampler.sample(draft[last], going, 0)
        second = sampler.sample(draft[first], going, 1)
        drafts = torch.stack([first, second], 1).tolist()
        positions = SampledPositions.with_drafts(going, drafts)
        logits = torch.stack([model[last], model[first], model[second]], 1).reshape(-1, VOCAB)
        plain = DraftSampler(rows.batch, CPU, keeps=False)
        probabilities = torch.softmax(logits, -1)
        tokens = torch.zeros(len(positions), dtype=torch.int64)
        for offset in range(3):
            own = np.flatnonzero(positions.offsets == offset)
            tokens[own] = plain.sample(logits[own], going, offset)
        chosen = rejection.choose(positions, tokens, probabilities).numpy()
        result = accept_drafts(chosen, positions)
        judged += 2 * len(going)
        accepted_drafts += int(result.counts.sum()) - len(going)
        own = chosen.reshape(-1, 3)
        for place in range(2):
            fits = (at + place < 2) & (place < result.counts)
            found[going[fits], (at + place)[fits]] = own[fits, place]
        rows.batch.num_known[going] += result.counts
        ends = np.minimum(result.counts, 2 - at) - 1
        last = own[np.arange(len(going)), ends]
        still = found[going, 1] < 0
        going, last = going[still], last[still]
    return found, accepted_drafts / judged


@pytest.mark.parametrize("seed", [1, 2])
def test_distribution_equals_the_models(seed: int) -> None:
    model, draft = distributions(seed)
    found, share = two_tokens(model, draft)
    p = torch.softmax(model.double(), -1).numpy()
    expected = (p[0][:, None] * p) * ROWS
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, (found[:, 0], found[:, 1]), 1)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 51.2, "p < 0.001 for 24 degrees of freedom"
    q = torch.softmax(draft.double(), -1).numpy()
    assert 0.1 < share < 0.9
    # The draft model's distribution must not pass.
    wrong = (q[0][:, None] * q) * ROWS
    assert ((seen - wrong) ** 2 / wrong).sum() > 500


def test_equal_distributions_accept_every_draft() -> None:
    model, _ = distributions(3)
    _, share = two_tokens(model, model)
    assert share == 1.0


@pytest.mark.full
def test_same_seed_gives_the_same_text() -> None:
    model, draft = distributions(4)
    assert (two_tokens(model, draft)[0] == two_tokens(model, draft)[0]).all()


def test_greedy_rows_are_unchanged() -> None:
    rows = DraftBatch(2, 4)
    rows.change([], {1: [0], 2: [0]}, temperature=0.0)
    rejection = RejectionSampler(rows.batch, DraftSampler(rows.batch, CPU, keeps=True))
    positions = SampledPositions.with_drafts(np.arange(2), [[3], [1]])
    tokens = torch.tensor([3, 4, 2, 2])
    assert rejection.choose(positions, tokens, torch.zeros(4, VOCAB)).tolist() == [3, 4, 2, 2]
    assert rejection.chooser(SampledPositions.one_per_row(np.arange(2))) is None
