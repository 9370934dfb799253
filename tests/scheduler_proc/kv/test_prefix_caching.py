"""Prefix caching end to end: hits, sharing within a step, separation by salts, and correctness."""

from scheduler_driver import Driver, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason

PREFIX = list(range(100, 112))


def cached(driver: Driver, request_id: str) -> int:
    return driver.answers[request_id].num_cached_tokens


def test_hits_are_reported_to_the_client_and_counted() -> None:
    driver = Driver()
    driver.add("a", [*PREFIX, 1], max_tokens=1)
    driver.run()
    driver.add("b", [*PREFIX, 2], max_tokens=3)
    assert driver.counts(driver.schedule()) == {"b": 1}
    driver.run()
    assert (cached(driver, "a"), cached(driver, "b")) == (0, 12)
    assert driver.answers["b"].tokens == expected_tokens([*PREFIX, 2], 3)
    statistics = driver.scheduler.statistics()
    assert (statistics.prefix_cache_queries, statistics.prefix_cache_hit_tokens) == (26, 12)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    driver = Driver()
    for name in ("a", "b"):
        driver.add(name, PREFIX, max_tokens=2)
        driver.run()
    assert cached(driver, "b") == 8
    assert driver.answers["b"].tokens == driver.answers["a"].tokens == expected_tokens(PREFIX, 2)


def test_output_of_one_turn_is_a_hit_of_the_next() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("a", PREFIX, max_tokens=9)
    answer = driver.run()["a"].tokens
    driver.add("b", [*PREFIX, *answer, 5], max_tokens=1)
    driver.run()
    # The last output token was never computed, so its block (position 20) is not full.
    assert cached(driver, "b") == 20


def test_requests_admitted_in_one_step_share_its_blocks() -> None:
    driver = Driver()
    for name in ("a", "b", "c"):
        driver.add(name, [*PREFIX, ord(name)], max_tokens=2)
    assert driver.counts(driver.schedule()) == {"a": 13, "b": 1, "c": 1}
    driver.run()
    assert [cached(driver, n) for n in "abc"] == [0, 12, 12]
    for name in "abc":
        assert driver.answers[name].tokens == expected_tokens([*PREFIX, ord(name)], 2)


def test_written_chunks_of_a_prompt_are_shared() -> None:
    driver = Driver(max_num_batched_tokens=9)
    driver.add("a", [*PREFIX, 1], max_tokens=2)
    driver.add("b", [*PREFIX, 2], max_tokens=2)
    driver.run()
    assert cached(driver, "b") == 12
    assert driver.answers["b"].tokens == expected_tokens([*PREFIX, 2], 2)


def test_different_salts_share_no_blocks() -> None:
    driver = Driver()
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        driver.add(name, [*PREFIX, 1], max_tokens=1, cache_salt=salt)
        driver.run()
    assert [cached(driver, n) for n in "abcd"] == [0, 0, 0, 12]


def test_no_hits_when_prefix_caching_is_disabled() -> None:
    driver = Driver(enable_prefix_caching=False)
    for name in ("a", "b"):
        driver.add(name, [*PREFIX, 1], max_tokens=1)
        driver.run()
    assert cached(driver, "b") == 0


def test_reset_clears_the_cache_and_reports_success() -> None:
    driver = Driver()
    driver.add("a", [*PREFIX, 1], max_tokens=3)
    driver.step()
    assert not driver.control("reset_prefix_cache").done
    driver.run()
    assert driver.control("reset_prefix_cache").done
    driver.add("b", [*PREFIX, 1], max_tokens=1)
    driver.run()
    assert cached(driver, "b") == 0


def test_blocks_written_by_a_bad_row_are_not_reused() -> None:
    driver = Driver()
    driver.add("good", [*PREFIX[:8], 1], max_tokens=1)
    driver.run()
    driver.worker.bad_from["bad"] = 0
    driver.add("bad", [*PREFIX, 1], max_tokens=5)
    driver.run()
    assert driver.answers["bad"].reason is EndReason.ERROR
    driver.add("next", [*PREFIX, 2], max_tokens=2)
    driver.run()
    assert cached(driver, "next") == 8
    driver.check_drained()


def test_blocks_of_a_bad_row_are_not_reused_after_its_preemption() -> None:
    """Its blocks are free but still cached when the result arrives."""
    driver = Driver(num_blocks=8, async_scheduling=True)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=20)
    driver.add("bad", [*PREFIX[:8], 9, 9, 9], max_tokens=20)
    bad = driver.request("bad")
    for _ in range(60):
        if not bad.num_preemptions and driver.schedule() is None:
            driver.answer()
    assert bad.num_in_flight and driver.scheduler.kv.get_computed_blocks(bad)[1] >= 8
    driver.worker.bad_from["bad"] = bad.num_output_tokens
    driver.run()
    assert driver.answers["bad"].reason is EndReason.ERROR
    driver.add("next", [*PREFIX[:8], 9, 9, 9], max_tokens=1)
    driver.run()
    assert cached(driver, "next") == 0


def test_blocks_of_a_bad_row_are_not_reused_after_its_resumption() -> None:
    """It started with blocks of others, which were evicted while it waited, and then wrote them itself."""
    driver = Driver(num_blocks=9)
    driver.add("first", [*PREFIX[:8], 1], max_tokens=1)
    driver.run()
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=16)
    driver.add("bad", [*PREFIX[:8], 9, 9, 9], max_tokens=16)
    bad = driver.request("bad")
    for _ in range(20):
        if not bad.num_preemptions:
            driver.step()
    assert bad.num_cached_tokens == 8
    for block_hash in bad.block_hashes:
        driver.scheduler.kv.pool.invalidate(block_hash)
    driver.worker.bad_from["bad"] = bad.num_output_tokens
    driver.run()
    assert driver.answers["bad"].reason is EndReason.ERROR
    driver.add("next", [*PREFIX[:8], 2], max_tokens=1)
    driver.run()
    assert cached(driver, "next") == 0


def test_hashes_always_match_block_contents() -> None:
    """Many prompts over few blocks: the fake worker compares every slot read with its expected content."""
    driver = Driver(num_blocks=7, block_size=2, max_model_len=12, async_scheduling=True)
    for index in range(120):
        prompt = [*[1] * (1 + index % 7), index % 3]
        driver.add(f"r{index}", prompt, max_tokens=1 + index % 4)
        driver.step()
    driver.finish()
    assert driver.scheduler.statistics().prefix_cache_hit_tokens > 50
