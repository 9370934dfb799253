"""Stores do not change which content of the device is evicted next."""

import pytest
from scheduler_driver import Driver


def evictable(driver: Driver) -> list[bytes | None]:
    """Return the contents of free blocks in the order of eviction."""
    return [block.block_hash for block in driver.scheduler.kv.pool.free_block_queue.blocks() if block.block_hash]


@pytest.mark.parametrize("tenant", [0, 3])
@pytest.mark.parametrize("late", [False, True])
def test_order_of_eviction_is_that_without_a_tier(tenant: int, late: bool) -> None:
    """Prompts have nothing in common, so that nothing is loaded. ``late``: stores are answered after other steps."""
    orders = []
    for num_host_pages in (0, 400):
        driver = Driver(41, num_host_pages=num_host_pages, max_num_batched_tokens=16)
        order: list[list[bytes | None]] = []
        for number in range(24):
            prompt = [100 * number + 7 * at for at in range(9 + 4 * (number % 3))]
            driver.add(str(number), [token % 1000 for token in prompt], max_tokens=2, tenant=tenant)
            while not driver.scheduler.is_idle:
                driver.fill()
                if not driver.execute() or not late:
                    driver.move()
                while driver.deliver() is not None:
                    pass
            order.append(evictable(driver))
        orders.append(order)
        assert not num_host_pages or driver.scheduler.transfers.tiers()[0].num_stored > 20
    assert orders[0] == orders[1]
