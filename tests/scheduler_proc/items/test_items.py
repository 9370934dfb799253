"""Items in the scheduler, against the fake worker: it fails if a step computes a position whose rows are not there."""

import random
from typing import Any

import pytest
from fake_items import image
from keyframed_runs import keyframe_of, tails
from lines_in_memory import numbered, record_log
from scheduler_driver import Driver, expected_tokens

from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.item_messages import InputItem
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.trace.lines import decode_line, encode_line

CAUSAL = VisionConfig("TinyVision", token_id=9)
ATOMIC = VisionConfig("TinyVision", token_id=9, is_causal=False)
PROMPT = list(range(40))


def images(vision: VisionConfig = CAUSAL, capacity: int = 32, **settings: Any) -> Driver:
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_blocks": 65} | settings
    return Driver(vision=vision, encoder_cache_tokens=capacity, **settings)


def check_answers(driver: Driver, prompts: dict[str, tuple[list[int], list[InputItem]]], n: int = 3) -> None:
    for name, (prompt, items) in prompts.items():
        assert driver.answers[name].tokens == expected_tokens(prompt, n, items=items), name


def test_one_run_for_many_requests_and_turns() -> None:
    driver = images()
    picture = image("cat", (6, 8))
    for number in range(8):
        driver.add(f"r{number}", [*PROMPT[:20], number], max_tokens=3, items=[picture])
    driver.finish()
    second = [*PROMPT[:20], 0, *driver.answers["r0"].tokens, *range(50, 60)]
    driver.add("again", second, max_tokens=3, items=[picture])
    driver.finish()
    check_answers(driver, {"r7": ([*PROMPT[:20], 7], [picture]), "again": (second, [picture])})
    assert len(driver.worker.items.log) == 1 and driver.answers["again"].num_cached_tokens == 20
    found = driver.scheduler.statistics()
    assert (found.num_encoder_runs, found.num_encoder_hits, found.num_encoder_cache_tokens) == (1, 7, 8)
    assert driver.replay_lines() is None


@pytest.mark.parametrize("other", [image("dog", (6, 8)), image("cat", (5, 8)), None], ids=["content", "place", "text"])
def test_another_item_shares_no_block_from_its_first_position_on(other: InputItem | None) -> None:
    driver = images()
    driver.add("first", PROMPT[:24], max_tokens=1, items=[image("cat", (6, 8))])
    driver.finish()
    items = [] if other is None else [other]
    driver.add("second", PROMPT[:24], max_tokens=3, items=items)
    driver.finish()
    assert driver.answers["second"].num_cached_tokens == 4  # blocks of four; the second one has the first position
    check_answers(driver, {"second": (PROMPT[:24], items)})


def test_a_chunk_ends_before_rows_that_are_not_there() -> None:
    """Text before an image is computed meanwhile; other requests go on; the next image is asked for ahead of time."""
    driver = images(max_num_batched_tokens=12)
    items = [image("a", (14, 6)), image("b", (22, 2), (26, 2))]
    driver.add("pictures", PROMPT, max_tokens=3, items=items)
    for _ in range(2):
        driver.schedule(), driver.execute(), driver.deliver()
    assert [diff.counts for diff in driver.diffs] == [[(0, 12)], [(0, 2)]]
    assert driver.scheduler.statistics().num_encoder_runs == 2
    driver.add("text", PROMPT[20:30], max_tokens=3)
    listed = {each.request_id: each.reason for each in driver.control("requests").requests}
    assert listed == {"pictures": "encoder", "text": "queued"}
    driver.schedule()
    assert driver.diffs[-1].parked == [0] and driver.diffs[-1].new_requests[0].request_id == "text"
    driver.finish()
    check_answers(driver, {"pictures": (PROMPT, items), "text": (PROMPT[20:30], [])})
    assert driver.replay_lines() is None


@pytest.mark.parametrize("begin", [0, 3])
def test_a_request_that_lacks_rows_for_its_first_step_is_held_and_others_pass(begin: int) -> None:
    driver = images()
    driver.add("picture", PROMPT[:12], max_tokens=3, items=[image("a", (begin, 8))])
    driver.add("text", PROMPT[:9], max_tokens=3)
    driver.schedule()
    assert driver.scheduler.statistics().waiting_by_reason["encoder"] == 1
    assert [new.request_id for new in driver.diffs[-1].new_requests] == ["text"]
    driver.finish()
    check_answers(driver, {"picture": (PROMPT[:12], [image("a", (begin, 8))]), "text": (PROMPT[:9], [])})


def test_rows_are_not_encoded_for_positions_in_the_prefix_cache() -> None:
    driver = images()
    driver.add("first", PROMPT[:20], max_tokens=1, items=[image("a", (2, 6))])
    driver.finish()
    assert driver.control("reset_encoder_cache").done
    driver.add("second", PROMPT[:20], max_tokens=3, items=[image("a", (2, 6))])
    driver.finish()
    assert len(driver.worker.items.log) == 1 and driver.answers["second"].num_cached_tokens == 16


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("vision", [CAUSAL, ATOMIC], ids=["causal", "atomic"])
def test_requests_finish_with_room_for_one_item(vision: VisionConfig, asynchronous: bool) -> None:
    """Two requests with three items each, which need all of the cache; the rows of the one in front are never taken."""
    driver = images(vision, capacity=8, async_scheduling=asynchronous, max_num_batched_tokens=20)
    items = {name: [image(f"{name}{at}", (2 + 12 * at, 8)) for at in range(3)] for name in "ab"}
    for name in "ab":
        driver.add(name, PROMPT, max_tokens=3, items=items[name])
    driver.finish()
    check_answers(driver, {name: (PROMPT, items[name]) for name in "ab"})
    assert len(driver.worker.items.log) <= 8  # the second one may lose its first item to the first one's next
    assert driver.replay_lines() is None


@pytest.mark.parametrize(("begin", "chunks"), [(4, [16, 16, 8]), (10, [10, 16, 14]), (6, [6, 16, 16, 2])])
def test_no_chunk_ends_inside_an_image_that_attends_in_both_directions(begin: int, chunks: list[int]) -> None:
    driver = images(ATOMIC)
    items = [image("a", (begin, 12))]
    driver.add("a", PROMPT, max_tokens=3, items=items)
    driver.settle()
    driver.run()
    assert [count for diff in driver.diffs for _, count in diff.counts] == chunks
    check_answers(driver, {"a": (PROMPT, items)})


def test_an_image_that_no_chunk_divides_exceeds_the_prefill_share() -> None:
    """While others decode, its part of a step may be smaller than the image; a hit may end inside it."""
    driver = images(ATOMIC, max_num_batched_tokens=16, max_prefill_share=0.25)
    driver.add("text", PROMPT[:4], max_tokens=40)
    driver.step(2)
    items = [image("a", (2, 12))]
    driver.add("a", PROMPT[:20], max_tokens=3, items=items)
    driver.add("b", PROMPT[:12] + [99] * 4, max_tokens=3, items=[image("a", (2, 12))])
    driver.run()
    check_answers(driver, {"a": (PROMPT[:20], items), "b": (PROMPT[:12] + [99] * 4, items)})
    assert driver.replay_lines() is None


def test_an_image_is_computed_whole_where_a_request_should_compute_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load brings may begin inside an image, up to which the request then cannot compute."""
    driver = images(ATOMIC)
    calls, up_to_ten = driver.scheduler.core.calls, Feature()
    up_to_ten.hits = lambda *_: 10  # type: ignore[method-assign]
    monkeypatch.setattr(calls, "hits", (*calls.hits, up_to_ten))
    driver.add("a", PROMPT[:20], max_tokens=3, items=[image("a", (0, 12))])
    driver.add("b", PROMPT[20:35], max_tokens=3)
    driver.run()
    assert driver.diffs[0].counts[0] == (1, 10)
    assert (0, 15) in [count for diff in driver.diffs for count in diff.counts]  # beside a token of the other one
    check_answers(driver, {"a": (PROMPT[:20], [image("a", (0, 12))]), "b": (PROMPT[20:35], [])})


@pytest.mark.parametrize("is_running", [False, True])
def test_a_failed_encoding_ends_its_request_and_another_file_is_tried(is_running: bool) -> None:
    driver = images()
    driver.worker.items.fault = lambda encode: "its file is gone" if encode.item.path == "/shm/lost" else ""
    start = 18 if is_running else 0
    for name, path in (("a", "/shm/lost"), ("b", "/shm/there"), ("c", "/shm/lost")):
        driver.add(name, PROMPT[:30], max_tokens=3, items=[image("x", (start, 6), path=path)])
    driver.step() if is_running else driver.fill()
    driver.finish()
    for name in "ac":
        answer = driver.answers[name]
        if is_running and name == "a":
            assert answer.ended is not None and answer.reason is EndReason.ERROR
            assert answer.ended.detail == "image_not_encoded: its file is gone"
        elif answer.rejected is not None:
            assert (answer.rejected.code, answer.rejected.param) == ("image_not_encoded", "messages")
        else:
            assert answer.reason is EndReason.ERROR
    check_answers(driver, {"b": (PROMPT[:30], [image("x", (start, 6))])})
    assert len(driver.worker.items.log) == 2 and driver.scheduler.statistics().num_encoder_failures == 1
    assert driver.replay_lines() is None


def test_new_workers_encode_again_and_stray_answers_are_ignored() -> None:
    driver = images()
    items = [image("a", (0, 6)), image("b", (8, 6))]
    driver.add("a", PROMPT[:20], max_tokens=3, items=items)
    driver.fill()
    driver.restart_worker()
    driver.step(3)
    driver.restart_worker()
    driver.finish()
    check_answers(driver, {"a": (PROMPT[:20], items)})
    assert len(driver.worker.items.log) >= 3 and driver.replay_lines() is None


def test_forks_and_beams_have_the_items_of_their_request() -> None:
    driver = images()
    items = [image("a", (2, 6)), image("end", (18, 2))]
    driver.add("parent", PROMPT[:20], max_tokens=6, items=items)
    driver.add("child", [], max_tokens=6, forked_from="parent", num_forked_tokens=20)
    driver.add("beams", PROMPT[:20], max_tokens=3, items=items, use_beam_search=True, beam_width=2)
    driver.step(2)
    driver.add("late", [], max_tokens=4, forked_from="parent", num_forked_tokens=20)
    driver.add("wrong", [], max_tokens=4, forked_from="parent", items=items)
    driver.finish()
    for name, n in (("parent", 6), ("child", 6), ("late", 4)):
        check_answers(driver, {name: (PROMPT[:20], items)}, n)
    assert driver.answers["beams"].hypotheses and len(driver.worker.items.log) == 2
    wrong = driver.answers["wrong"].rejected
    assert wrong is not None and "the items of its parent" in wrong.message
    assert driver.replay_lines() is None


def test_a_reset_needs_a_cache_without_users() -> None:
    driver = images()
    driver.add("a", PROMPT[:20], max_tokens=3, items=[image("a", (0, 6))])
    assert not driver.control("reset_encoder_cache").done
    driver.finish()
    assert driver.control("reset_encoder_cache").done and not driver.control("nonsense").done
    assert driver.scheduler.statistics().num_encoder_cache_tokens == 0


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 60))])
def test_random_runs(seed: int) -> None:
    """Whatever happens, every request ends with the tokens of its prompt and items, and a replay decides the same."""
    rng = random.Random(seed)
    vision = rng.choice((CAUSAL, ATOMIC, VisionConfig("TinyVision", 9, mrope_section=(1, 1))))
    driver = images(
        vision,
        capacity=rng.choice((8, 12, 40)),
        num_blocks=rng.choice((16, 24, 65)),
        async_scheduling=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice((12, 16, 32)),
        max_prefill_share=rng.choice((0.3, 1.0)),
        enable_prefix_caching=rng.random() < 0.8,
        scheduling_policy=rng.choice(("fcfs", "priority")),
        steady_decode=rng.random() < 0.8,
    )
    broken = {"/shm/lost"} if rng.random() < 0.3 else set()
    driver.worker.items.fault = lambda encode: "it is gone" if encode.item.path in broken else ""
    sent: dict[str, tuple[list[int], list[InputItem]]] = {}
    for number in range(14):
        items, at = [], rng.choice((0, 3))
        while at < 30 and rng.random() < 0.7:
            size = rng.choice((2, 5, 8))
            items.append(image(f"{rng.randrange(5)}-{size}", (at, size), path=rng.choice(("/shm/lost", ""))))
            at += size + rng.choice((0, 1, 6))
        name, prompt = f"r{number}", PROMPT[: max(at, 4) + rng.randrange(6)]
        fields = {"priority": rng.randrange(3), "tenant": rng.randrange(2)}
        driver.add(name, prompt, max_tokens=rng.randrange(1, 6), items=items, **fields)
        sent[name] = prompt, items
        for _ in range(rng.randrange(12)):
            driver.random_step(rng)
        chance = rng.random()
        if chance < 0.1:
            driver.restart_worker()
        elif chance < 0.15:
            driver.begin_worker_epoch()
        elif chance < 0.25:
            driver.abort(rng.choice(list(sent)))
        elif chance < 0.3:
            driver.control("reset_encoder_cache")
        elif chance < 0.4:
            keyframe_of(driver)
    driver.finish()
    for name, (prompt, items) in sent.items():
        answer = driver.answers[name]
        assert answer.tokens == expected_tokens(prompt, len(answer.tokens), items=items), name
        is_suspect = answer.ended is not None and answer.ended.detail.startswith("engine_fault")
        if not is_suspect and (answer.reason is EndReason.ERROR or answer.rejected is not None):
            assert any(item.path in broken for item in items), f"{name}: {answer.ended or answer.rejected}"
    assert driver.replay_lines() is None
    for records in tails(driver):
        lines = [encode_line(line) for line in record_log(driver.header, records)]
        assert replay_lines(numbered(map(decode_line, lines))) is None
        assert not any(b"/shm/" in line for line in lines), "a trace has the path of a file"
