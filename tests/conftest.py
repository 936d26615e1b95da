"""Every test runs with strict dtype promotion and without implicit rank promotion."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real inputs that are not part of the project; tests that use it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the optional folder of real inputs {SHARED_DATA} is absent")
    return SHARED_DATA
