"""Fields of PoolingParams: errors that name the field and its range."""

from typing import Any

import pytest

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.pooling_params import PoolingParams


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("task", ("rank", "", 7, None), "task must be one of embed, "),
        ("dimensions", (-1, 2**31, 1.5, True, None), "dimensions must be an integer from 0 to "),
        ("second_text", (-1, 2**31, 1.5, True, None), "second_text must be an integer from 0 to "),
        ("use_activation", (1, "yes", None), "use_activation must be true or false (got "),
        ("skip_reading_prefix_cache", (1, "yes", None), "skip_reading_prefix_cache must be true or false (got "),
    ],
)
def test_error_names_the_field_and_its_range(name: str, values: tuple[Any, ...], says: str) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refused:
            PoolingParams(**{name: value})
        assert refused.value.param == name and refused.value.message.startswith(says), value
