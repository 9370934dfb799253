"""The service of tenants: the service by others reaches each engine once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.router_proc.core.tenants import TenantBook


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["serve", "give back", "report", "take", "forget"])), max_size=40
    )
)
def test_each_engine_gets_the_service_of_the_others_once(actions: list[tuple[int, str]]) -> None:
    book = TenantBook()
    served = [Counter({1: 0}) for _ in range(3)]
    reported: list[Counter[int] | None] = [None] * 3
    expected = [Counter[int]() for _ in range(3)]
    for number, (engine, action) in enumerate(actions):
        match action:
            case "serve":
                served[engine][1 + number % 2] += number
            case "give back":
                served[engine][1 + number % 2] -= number // 2
            case "report":
                book.report(engine, dict(served[engine]))
                if (before := reported[engine]) is not None:
                    for other in range(3):
                        if other != engine and reported[other] is not None:
                            expected[other].update(served[engine])
                            expected[other].subtract(before)
                reported[engine] = served[engine].copy()
            case "take" if reported[engine] is not None:
                found = book.take(engine)
                assert Counter(dict(found.served if found is not None else ())) == expected[engine]
                expected[engine].clear()
            case "forget":
                book.forget(engine)
                served[engine], reported[engine] = Counter({1: 0}), None
                expected[engine].clear()
