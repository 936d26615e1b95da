"""A target for a calibration, loaded once its plan fits into memory."""

import sys
from typing import TYPE_CHECKING

from layerwave.calibration.settings import CalibrationSettings

if TYPE_CHECKING:
    from layerwave.targets import Target


def load_planned(
    name: str, dtype: str, settings: CalibrationSettings, mesh: str | None, batch_tokens: int | None
) -> tuple["Target", int]:
    """Prints the plan, and loads the target; with it, the tokens of a batch.

    Raises:
        LayerwaveError: a mesh that cannot be made, or a plan that does not fit.
    """
    from layerwave.calibration.plan import plan_calibration
    from layerwave.targets import load_target, make_mesh, read_config

    devices = make_mesh(mesh)
    plan = plan_calibration(read_config(name), dtype, settings, devices, batch_tokens)
    print(f"plan: {plan}", file=sys.stderr, flush=True)
    return load_target(name, dtype, devices), plan.batch_tokens
