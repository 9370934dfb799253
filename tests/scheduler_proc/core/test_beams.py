"""Beam searches in the scheduler: their requests, blocks and ends; what they find is compared with a search alone."""

from typing import Any

import pytest
from fake_worker import FakeWorker
from scheduler_driver import Driver, change

from quire.protocol.wire.front_end_messages import EndReason

PROMPT = list(range(1, 15))


def searching(width: int = 3, **settings: Any) -> Driver:
    driver = Driver(**settings)
    driver.add("s", PROMPT, max_tokens=6, use_beam_search=True, beam_width=width)
    return driver


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_what_they_have_in_common(asynchronous: bool, caching: bool) -> None:
    """No token is computed twice: the prompt once, then one token of each beam; blocks of the prompt are shared."""
    driver = searching(async_scheduling=asynchronous, enable_prefix_caching=caching)
    sizes: list[int] = []
    while not driver.scheduler.is_idle:
        driver.step()
        sizes += [driver.scheduler.kv.pool.num_usable_blocks - driver.scheduler.kv.pool.num_free_blocks]
    assert sum(record * count for record, count in driver.scheduler.stats.steps_by_size.items()) == 14 + 5 * 3
    assert max(sizes) <= 3 + 3 * 2 + 1, "shared blocks, two of each beam, and one that is copied from"
    assert driver.answers["s"].reason is EndReason.LENGTH and not driver.answers["s"].tokens
    assert [len(found.tokens) for found in driver.answers["s"].hypotheses] == [6, 6, 6]
    driver.check_drained()
    assert driver.replay_lines() is None


@pytest.mark.parametrize("after", range(6))
def test_client_ends_a_search(after: int) -> None:
    driver = searching(async_scheduling=True)
    driver.step(after)
    driver.abort("s")
    assert driver.answers["s"].reason is EndReason.ABORTED
    driver.finish()
    assert driver.replay_lines() is None


@pytest.mark.parametrize("after", range(6))
def test_search_survives_workers_and_a_pause(after: int) -> None:
    driver, alone = searching(async_scheduling=True), searching()
    driver.step(after)
    driver.restart_worker()
    driver.step(after % 3)
    driver.control("pause_new")
    driver.step(3)
    driver.control("resume")
    driver.finish()
    alone.finish()
    assert driver.answers["s"].hypotheses == alone.answers["s"].hypotheses
    assert driver.replay_lines() is None


def test_drain_completes_a_search() -> None:
    """Its beams do not count as new requests."""
    driver = searching()
    driver.step(2)
    driver.control("pause_new")
    driver.finish()
    assert driver.answers["s"].reason is EndReason.LENGTH


@pytest.mark.parametrize("output", [0, 2])
def test_bad_logits_end_the_whole_search(output: int) -> None:
    driver = searching()
    driver.worker.bad_from["s"] = output
    driver.add("other", [5, 6, 7], max_tokens=4)
    driver.finish()
    assert driver.answers["s"].reason is EndReason.ERROR and not driver.answers["s"].hypotheses
    assert driver.answers["other"].reason is EndReason.LENGTH
    assert driver.replay_lines() is None


@pytest.mark.parametrize(
    ("extra", "settings", "param"),
    [
        ({"beam_width": 9}, {}, "beam_width"),
        ({"beam_width": 4}, {"max_num_seqs": 3}, "beam_width"),
        ({"beam_width": 2, "forked_from": "p"}, {}, "use_beam_search"),
    ],
)
def test_search_that_cannot_run_is_refused(extra: dict[str, Any], settings: dict[str, Any], param: str) -> None:
    driver = Driver(**settings)
    driver.add("p", PROMPT, max_tokens=3)
    driver.add("s", [] if "forked_from" in extra else PROMPT, max_tokens=3, use_beam_search=True, **extra)
    driver.finish()
    rejected = driver.answers["s"].rejected
    assert rejected is not None and rejected.param == param
    assert driver.answers["p"].reason is EndReason.LENGTH


def test_search_cannot_be_forked() -> None:
    driver = searching()
    driver.add("child", [], forked_from="s", max_tokens=3)
    assert driver.answers["child"].rejected is not None
    driver.finish()


def test_result_without_candidates_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = searching()
    sample = FakeWorker._sample
    monkeypatch.setattr(FakeWorker, "_sample", lambda worker, chunks: change(sample(worker, chunks), side=[]))
    driver.finish()
    assert driver.answers["s"].reason is EndReason.ERROR
