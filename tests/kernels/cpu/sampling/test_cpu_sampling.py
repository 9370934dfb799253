"""Sampling and log probabilities by the native library against the references in torch."""

import math

import pytest
import torch
from tiers import covering

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.sampling.logits import CpuLogits
from quire.kernels.cpu.sampling.sampling import CpuSampling, SamplingColumns
from quire.kernels.sampling.sampling import sample_reference, sampled_logits
from quire.kernels.sampling.sampling_logprobs import TOLERANCE, top_logprobs_reference
from quire.kernels.sampling.sampling_noise import uniform_reference

CASES = [
    # temperature, top_k, top_p, min_p
    (0.8, 50, 0.95, 0.05),
    (0.0, 5, 0.5, 0.2),
    (1.0, 0, 0.9, 0.0),
    (0.7, 0, 1.0, 0.1),
    (2.0, 900, 0.999, 0.0),
    (1.3, 20, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 2**30, 1.0, 0.01),
    (1e-30, 0, 0.5, 0.0),
    (1.0, 7, 1e-9, 0.5),
    (1.0, 7, 1.0, 1.0),
    (1e-44, 0, 1.0, 0.0),
]


def columns_of(rows: int, cases: list[tuple[float, int, float, float]]) -> SamplingColumns:
    """Return columns whose rows repeat the cases, with the seeds 0, 1, ..."""
    temperature, top_k, top_p, min_p = (torch.tensor(c) for c in zip(*(cases * rows)[:rows], strict=True))
    seeds = torch.arange(rows).to(torch.uint64)
    return SamplingColumns(seeds, torch.arange(5, 5 + rows).int(), temperature, top_k.int(), top_p, min_p)


def expected(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    noise = uniform_reference(columns.seed, columns.num_known)
    return sample_reference(logits, noise, columns.temperature, columns.top_k, columns.top_p, columns.min_p)


def sample(native: Native, logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    rows = torch.arange(len(logits))
    tokens, bad = CpuSampling(native, columns).sample(logits, rows, torch.zeros_like(rows))
    assert not bad.any()
    return tokens


@pytest.mark.parametrize(
    ("vocab", "kind"), covering([1, 7, 300, 2048, 9001], ["distinct", "equals", "sharp", "masked"])
)
def test_tokens_equal_the_reference(vocab: int, kind: str, native: Native) -> None:
    rng = torch.Generator().manual_seed(vocab)
    rows = (24 if vocab < 1000 else 5) * len(CASES)
    logits = (torch.randn(rows, vocab + 3, generator=rng) * (12 if kind == "sharp" else 3))[:, :vocab]
    if kind == "equals":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1:] = logits[:, 1:].masked_fill(torch.rand(rows, vocab - 1, generator=rng) < 0.99, -torch.inf)
    columns = columns_of(rows, CASES)
    assert torch.equal(sample(native, logits, columns), expected(logits, columns))


def test_tokens_equal_the_reference_for_noise_all_over_the_interval(native: Native) -> None:
    """Rows have different seeds and positions, so that their noise covers [0, 1)."""
    logits = (torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 2).round().expand(4000, 64)
    for case in (CASES[0], CASES[2], CASES[3], CASES[7]):
        columns = columns_of(len(logits), [case])
        assert torch.equal(sample(native, logits, columns), expected(logits, columns))


@pytest.mark.full
def test_best_tokens_are_found_at_any_index(native: Native) -> None:
    """The best tokens are in different chunks of the row, or in one vector."""
    for places in ([10, 1600, 8000, 4500], [4000, 4001, 4002, 4003]):
        logits = torch.full((200, 9001), -5.0)
        logits[:, places] = torch.tensor([0.0, -0.1, -0.2, -0.3])
        columns = columns_of(200, [(1.0, 4, 1.0, 0.0)])
        tokens = sample(native, logits, columns)
        assert set(tokens.tolist()) == set(places)
        assert torch.equal(tokens, expected(logits, columns))


def test_positions_use_their_row_and_offset(native: Native) -> None:
    rng = torch.Generator().manual_seed(1)
    columns = columns_of(12, CASES)
    logits = torch.randn(7, 500, generator=rng) * 3
    rows, offsets = torch.tensor([11, 0, 0, 0, 7, 7, 2]), torch.tensor([0, 0, 1, 2, 0, 1, 0])
    tokens, _ = CpuSampling(native, columns).sample(logits, rows, offsets)
    noise = uniform_reference(columns.seed[rows], columns.num_known[rows] + offsets)
    own = (column[rows] for column in (columns.temperature, columns.top_k, columns.top_p, columns.min_p))
    assert torch.equal(tokens, sample_reference(logits, noise, *own))


def test_row_does_not_depend_on_threads_and_other_rows(native: Native) -> None:
    logits = torch.randn(24, 6000, generator=torch.Generator().manual_seed(2)) * 3
    columns = columns_of(24, CASES)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(sample(native, logits, columns))
    finally:
        torch.set_num_threads(threads)
    sampler = CpuSampling(native, columns)
    alone = [sampler.sample(logits[i : i + 1], torch.tensor([i]), torch.tensor([0]))[0] for i in range(24)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], torch.cat(alone))


def test_bad_rows_get_their_best_token_and_do_not_affect_others(native: Native) -> None:
    logits = torch.zeros(5, 700)
    logits[0, 9] = torch.nan
    logits[1] = -torch.inf
    logits[2, 699] = torch.inf
    logits[3, 5], logits[3, 650] = torch.inf, torch.nan
    rows = torch.arange(5)
    for case in CASES[:4]:
        tokens, bad = CpuSampling(native, columns_of(5, [case])).sample(logits, rows, torch.zeros_like(rows))
        assert bad.tolist() == [True, True, True, True, False]
        assert tokens[:4].tolist() == [9, 0, 699, 650]
    assert CpuLogits(native).bad(logits).tolist() == [True, True, True, True, False]


def test_empty_batch_is_allowed(native: Native) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tokens, bad = CpuSampling(native, columns_of(3, CASES)).sample(torch.zeros(0, 5), none, none)
    assert len(tokens) == len(bad) == 0


def test_sampled_logits_have_the_drawn_distribution() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().repeat(5, 1)
    got = sampled_logits(
        logits,
        temperature=torch.tensor([1.0, 1.0, 0.5, 0.0, 1.0]),
        top_k=torch.tensor([3, 0, 0, 1, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.6, 1.0, 1.0, 0.6]),
        min_p=torch.tensor([0.0, 0.0, 0.2, 0.0, 0.3]),
    )
    want = torch.tensor(
        [
            [4 / 7, 2 / 7, 1 / 7, 0],
            [2 / 3, 1 / 3, 0, 0],
            [0.8, 0.2, 0, 0],
            [0.5, 0.25, 0.125, 0.125],
            [1, 0, 0, 0],  # min-p keeps 0.75 of the mass, of which top-p takes 0.45
        ]
    )
    torch.testing.assert_close(torch.softmax(got, -1), want)


@pytest.mark.parametrize(("vocab", "n"), [(1, 1), (7, 7), (40, 40), (300, 0), (300, 20), (5000, 20), (5000, 700)])
@pytest.mark.parametrize("equals", [False, True])
def test_logprobs_equal_the_reference(vocab: int, n: int, equals: bool, native: Native) -> None:
    rng = torch.Generator().manual_seed(vocab + n)
    logits = (torch.randn(9, vocab + 3, generator=rng) * 3)[:, :vocab]
    logits[0, 1:] = -torch.inf
    logits = logits.round() if equals else logits
    tokens = torch.randint(0, vocab, (9,), generator=rng)
    got, want = CpuLogits(native).top_logprobs(logits, tokens, n), top_logprobs_reference(logits, tokens, n)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.ranks, want.ranks)
    torch.testing.assert_close(got.values, want.values, rtol=TOLERANCE[0], atol=TOLERANCE[1])


def test_logprobs_of_a_row_with_nan_have_valid_tokens(native: Native) -> None:
    logits = torch.zeros(1, 20)
    logits[0, :15] = torch.nan
    found = CpuLogits(native).top_logprobs(logits, torch.tensor([3]), 10)
    assert found.token_ids[0, :6].tolist() == [3, 15, 16, 17, 18, 19]
    assert 0 <= int(found.token_ids.min()) <= int(found.token_ids.max()) < 20
    assert math.isnan(found.values[0, 0])


def test_logprob_of_a_token_out_of_range_is_nan(native: Native) -> None:
    found = CpuLogits(native).top_logprobs(torch.zeros(3, 20), torch.tensor([-1, 20, 19]), 1)
    assert found.values[:, 0].isnan().tolist() == [True, True, False]
    assert found.ranks.tolist() == [1, 1, 1] and found.token_ids[:, 1].tolist() == [0, 0, 0]


def test_invalid_arguments_are_rejected(native: Native) -> None:
    columns = columns_of(3, CASES)
    sampler, rows, logits = CpuSampling(native, columns), torch.arange(2), torch.zeros(2, 9)
    for arguments, error in [
        ((logits.double(), rows, rows), "logits: dtype"),
        ((torch.zeros(2, 0), rows, rows), "vocab"),
        ((logits.T.contiguous().T, rows, rows), "logits: the innermost"),
        ((logits, rows.int(), rows), "rows: dtype"),
        ((logits, rows, rows[:1]), "offsets: dimension 0"),
    ]:
        with pytest.raises(ValueError, match=error):
            sampler.sample(*arguments)
    with pytest.raises(ValueError, match="seed: dtype"):
        CpuSampling(native, SamplingColumns(*[columns.temperature] * 6))
    with pytest.raises(ValueError, match="min_p: dimension 0"):
        CpuSampling(native, SamplingColumns(*list(_fields(columns))[:5], columns.min_p[:2]))
    functions = CpuLogits(native)
    with pytest.raises(ValueError, match="n must be between 0 and 9"):
        functions.top_logprobs(logits, rows, 10)
    with pytest.raises(ValueError, match="tokens: dtype"):
        functions.top_logprobs(logits, rows.int(), 1)


def _fields(columns: SamplingColumns) -> list[torch.Tensor]:
    c = columns
    return [c.seed, c.num_known, c.temperature, c.top_k, c.top_p, c.min_p]
