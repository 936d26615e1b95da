"""For all tests of this room."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def all_modules(quick_compilation):
    """Compile quickly."""
