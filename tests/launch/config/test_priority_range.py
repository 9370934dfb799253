"""The priorities that a server allows: by default, an API key cannot raise the priority of its requests."""

import pytest
from configs import config_of
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.frontend.http.schema.errors import as_api_error
from quire.launch.config.engine_config import with_api_keys
from quire.protocol.errors import ConfigError, InvalidRequest

LOWEST, HIGHEST = -(2**31), 2**31 - 1


GOOD = {
    "0:0": (0, 0),
    "-5:5": (-5, 5),
    "0:2147483647": (0, HIGHEST),
    "-2147483648:2147483647": (LOWEST, HIGHEST),
    "-9:-3": (-9, -3),
    "007:10": (7, 10),
}
BAD = [
    "", ":", "0", "0:", ":0", "5:4", "a:b", "0:1:2", "0-5", "0:5 ", " 0:5", "0:5\n", "+0:5", "0.0:5", "1e3:9e9",
    "-2147483649:0", "0:2147483648", "--1:2", "0:-1", "٣:٤", "0x1:0x2", "99999999999:1", "-:-", "0;5", "\0:1",
    "9" * 999,
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_range_is_parsed(text: str) -> None:
    assert config_of(priority_range=text).priority_range == GOOD[text]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--priority-range must be LOW:HIGH, from -2147483648 to 2147483647"
    ) as caught:
        config_of(priority_range=text)
    assert len(str(caught.value)) < 300


def test_api_keys_set_a_default_range() -> None:
    assert with_api_keys(config_of(), []).priority_range is None
    assert with_api_keys(config_of(), ["a", "b"]).priority_range == (0, HIGHEST)
    assert with_api_keys(config_of(priority_range="-7:7"), ["a", "b"]).priority_range == (-7, 7)
    isolated = [with_api_keys(config_of(), ["key"] * count).isolate_prefix_cache_by_key for count in (0, 1, 2)]
    assert isolated == [False, False, True]
    shared = config_of(isolate_prefix_cache_by_key=False)
    assert with_api_keys(shared, ["a", "b"]).isolate_prefix_cache_by_key is False
    assert [with_api_keys(config_of(), ["key"] * count).num_tenants for count in (0, 1, 5)] == [0, 1, 5]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("tenant", [0, 1, 9])
@pytest.mark.parametrize(
    "priority", thinned([LOWEST, LOWEST + 1, -1_000_000, -10, -6, 6, 7, 1000, HIGHEST - 1, HIGHEST], keep=3)
)
def test_a_priority_out_of_range_gets_403(priority: int, tenant: int, policy: str) -> None:
    driver = Driver(scheduling_policy=policy, priority_range=(-5, 5))
    driver.add("pushy", [1], max_tokens=1, priority=priority, tenant=tenant)
    refused = driver.answers["pushy"].rejected
    assert refused is not None
    error = as_api_error(InvalidRequest(refused.message, refused.param, refused.code))
    assert (error.status, error.param, error.code) == (403, "priority", "priority_not_allowed")
    assert error.message == f"this server allows a priority from -5 to 5 (got {priority})"
    driver.add("canary", [2], max_tokens=3, ignore_eos=True, priority=-5, tenant=tenant)
    assert driver.run()["canary"].tokens == expected_tokens([2], 3)


@pytest.mark.parametrize("priority", [LOWEST, HIGHEST])
def test_without_a_range_any_priority_is_allowed(priority: int) -> None:
    driver = Driver(scheduling_policy="priority")
    driver.add("any", [1], max_tokens=1, priority=priority)
    assert driver.run()["any"].rejected is None
