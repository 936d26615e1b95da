"""Every test runs with strict dtype promotion and without implicit rank promotion."""

from pathlib import Path

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def programs_are_freed():
    """Compiled programs are mapped into memory, and of mappings Linux allows 65,530 to a process: with those of all
    modules together XLA ends in a segmentation fault."""
    yield
    jax.clear_caches()


@pytest.fixture
def unchecked_signatures():
    """Calls as users make them: nothing checks the annotations, and what is wrong meets the function itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which compilation is most of the time: what XLA leaves out changes the last bits, everywhere."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real inputs that are not part of the project; tests that use it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the optional folder of real inputs {SHARED_DATA} is absent")
    return SHARED_DATA
