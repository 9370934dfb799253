"""The native library, for the tests of its kernels."""

import pytest

from quire.kernels.cpu.native.library import Native, load_native


@pytest.fixture(scope="session")
def native() -> Native:
    found = load_native()
    if found is None:
        pytest.skip("no compiler here")
    return found
