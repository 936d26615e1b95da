"""The selected set under every reading of the method that the paper leaves open."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.methods import SelectionSettings, select

FACTORS = ("final_state", "sinks", "weighting", "rho", "alpha")


@dataclass(frozen=True)
class SensitivityRow:
    """One combination of settings, and what was selected under it."""

    final_state: str
    """pre_norm or post_norm; `given` for states that a user brought, as are `sinks`."""
    sinks: str
    weighting: str
    rho: float | None
    """Kept fraction of tokens; None for given states."""
    alpha: float
    layers: tuple[int, ...] | None
    """The selected set; None when it was not measured."""
    score: float | None
    missing: str = ""
    """What must be run to measure this row; empty when it was measured."""

    @property
    def combination(self) -> dict[str, str | float | None]:
        """The settings alone."""
        return {factor: getattr(self, factor) for factor in FACTORS}


@dataclass(frozen=True)
class SensitivityTable:
    """The selected set under every combination of final state, sinks, weighting, filter and order of the entropy."""

    rows: tuple[SensitivityRow, ...]
    baseline: SensitivityRow
    """The row of the first calibration's own settings and of the selection's settings; one of `rows`."""
    method: str
    size: int

    @property
    def measured(self) -> tuple[SensitivityRow, ...]:
        """Rows that have a selection."""
        return tuple(row for row in self.rows if row.layers is not None)

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be run to fill the other rows, each once."""
        return tuple(dict.fromkeys(row.missing for row in self.rows if row.missing))

    @property
    def sets(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """The selected sets and how many measured rows chose each, most frequent first."""
        return tuple(Counter(row.layers for row in self.measured).most_common())

    @property
    def agreement(self) -> float:
        """Share of the measured rows that select the baseline's set."""
        return sum(row.layers == self.baseline.layers for row in self.measured) / len(self.measured)

    @property
    def changed_by(self) -> tuple[str, ...]:
        """Factors that change the set when they alone leave the baseline, as far as measured."""
        return tuple(
            factor
            for factor in FACTORS
            if any(
                row.layers != self.baseline.layers
                and replace(row, **{factor: getattr(self.baseline, factor)}).combination == self.baseline.combination
                for row in self.measured
            )
        )

    @property
    def reading(self) -> str:
        """One sentence."""
        alone = f"changed by {', '.join(self.changed_by)} alone" if self.changed_by else "changed by no factor alone"
        left = len(self.rows) - len(self.measured)
        return (
            f"{self.agreement:.0%} of {len(self.measured)} measured combinations select {list(self.baseline.layers)} "
            f"as the baseline does ({len(self.sets)} different sets; {alone})"
            + (f"; {left} combinations need another pass." if left else ".")
        )


def sensitivity(
    calibrations: Sequence[Calibration],
    settings: SelectionSettings,
    *,
    rhos: Sequence[int | float] = (0.1, 0.3, 1.0),
    alphas: Sequence[int | float] = (0.5, 1.0, 2.0),
) -> SensitivityTable:
    """Selects under every combination of final state, sinks, weighting, rho and alpha that the calibrations measured.

    One pass fills `rho` as calibrated and `rho = 1`, with and without sinks, for one final state: 24 of the default 72
    combinations. Rows of another final state or rho say which calibration they need; more calibrations of the same
    samples fill them. Given states (`from_states`) vary in weighting and alpha alone.

    Args:
        calibrations: of one target and the same samples; the baseline is the first one's settings.
        settings: of the selection; its weighting and alpha are the baseline's.
        rhos, alphas: values to show, beside those of the calibrations and of the settings.

    Raises:
        LayerwaveError: for no calibration, several that are not comparable (the difference is named) or given by a
            user, for the criterion `acceptance`, which reads no pool, and as `select` does.
    """
    if settings.criterion == "acceptance":
        raise LayerwaveError(
            "acceptance reads single positions, which neither filter nor alpha changes: compare selections of another "
            "weighting, or from a calibration with other sinks or another final state"
        )
    _check_comparable(calibrations)
    alphas = sorted({*map(float, alphas), float(settings.alpha)})
    weightings = ("raw", "trace")
    first = calibrations[0].settings
    if first is None:
        pools = {("given", "given", None): calibrations[0].states}
        origin = ("given", "given", None)
    else:
        rhos = sorted({*map(float, rhos), *(float(c.settings.rho) for c in calibrations)})
        found = {key: states for calibration in calibrations for key, states in _pools(calibration)}
        pools = {
            key: found.get(key, _needed(key)) for key in product(("pre_norm", "post_norm"), ("keep", "drop"), rhos)
        }
        origin = (first.final_state, first.sinks, float(first.rho))
    rows = []
    for (final_state, sinks, rho), states in pools.items():
        for weighting, alpha in product(weightings, alphas):
            row = SensitivityRow(final_state, sinks, weighting, rho, alpha, None, None)
            if isinstance(states, str):
                rows.append(replace(row, missing=states))
                continue
            chosen = select(Calibration.from_states(states), replace(settings, weighting=weighting, alpha=alpha))
            rows.append(replace(row, layers=chosen.layers, score=chosen.score))
    baseline = next(
        row
        for row in rows
        if (row.final_state, row.sinks, row.rho) == origin
        and (row.weighting, row.alpha) == (settings.weighting, float(settings.alpha))
    )
    return SensitivityTable(tuple(rows), baseline, settings.method, settings.size)


def _pools(calibration: Calibration) -> Iterator[tuple[tuple[str, str, float], np.ndarray | str]]:
    """The states of the four pools of one pass by final state, sinks and rho; text where a pool is empty."""
    s = calibration.settings
    for filtered, sinks in product((False, True), ("keep", "drop")):
        try:
            states = calibration.pool(filtered=filtered, sinks=sinks)
        except LayerwaveError as error:  # said in the row
            states = str(error)
        yield (s.final_state, sinks, float(s.rho) if filtered else 1.0), states


def _needed(key: tuple[str, str, float]) -> str:
    final_state, _, rho = key
    # Any pass of this final state gives rho = 1.
    return f"calibrate with final_state={final_state}" + (f", rho={rho:g}" if rho < 1 else "")


def _check_comparable(calibrations: Sequence[Calibration]) -> None:
    if not calibrations:
        raise LayerwaveError("no calibration: give at least one")
    if len(calibrations) > 1 and any(calibration.settings is None for calibration in calibrations):
        raise LayerwaveError("given states cannot be compared with other calibrations: give them alone")
    first = calibrations[0]
    for calibration in calibrations[1:]:
        for what in ("target_fingerprint", "target_dtype", "data_fingerprint"):
            if getattr(calibration, what) != getattr(first, what):
                raise LayerwaveError(
                    f"the calibrations differ in {what}, so that the table would not show the settings alone: "
                    "calibrate the same target on the same conversations"
                )
        for what in ("block", "max_length", "sink_multiple"):
            got, expected = getattr(calibration.settings, what), getattr(first.settings, what)
            if got != expected:
                raise LayerwaveError(
                    f"the calibrations differ in {what} ({expected} and {got}): calibrate with one {what}"
                )
