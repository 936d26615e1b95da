"""The tables of the report, as plain values; the template draws them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TypeAlias

import numpy as np

from layerwave.calibration import Calibration
from layerwave.interop import layer_ids_table
from layerwave.kernels import gram, matrix_entropy
from layerwave.selection import Diagnostics, Selection, chooser, find_transitions
from layerwave.selection.sets import join

Value: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under their headers; the first cell of a row names it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    marked: tuple[int, ...] = ()
    """Rows that stand out: what was chosen."""


def ids_table(selection: Selection) -> Table:
    """What each tool wants in its config, or why it refuses the set."""
    rows = layer_ids_table(selection.layers, selection.num_layers)
    names = {"output": "outputs, from 0", "boundary": "boundaries, layer + 1"}
    return Table(
        "Layer ids for each tool",
        ("tool", "ids to paste", "an id names", "note"),
        tuple(
            (row.title, "refused" if row.ids is None else str(list(row.ids)), names[row.reads], row.refusal or row.note)
            for row in rows
        ),
    )


def layers_table(calibration: Calibration, selection: Selection, findings: Diagnostics) -> Table:
    """Every layer: entropy, share of the norm, step to the next, how often it is chosen."""
    grams = gram(calibration.states.astype(np.float64))
    entropies, traces = matrix_entropy(grams), np.trace(grams, axis1=1, axis2=2)
    columns = ["layer l", "boundary b", "S_1 (nats)", "share of all traces", "transition δ to l + 1"]
    cells = [
        range(calibration.num_layers),
        range(1, calibration.num_layers + 1),
        entropies.tolist(),
        (traces / traces.sum()).tolist(),
        [*find_transitions(calibration).delta.tolist(), None],
    ]
    if findings.stability is not None:
        columns.append("share of replicates that choose it")
        cells.append(findings.stability.layer_frequency.tolist())
    return Table("Layers", tuple(columns), tuple(zip(*cells, strict=True)), selection.layers)


def beam_table(selection: Selection) -> Table:
    """The last beam, best first."""
    beam = selection.beams[-1] if selection.beams else ((selection.layers, selection.score),)
    return Table(
        f"Sets that {chooser(selection)} kept last",
        ("rank", "layers", "boundaries", score_name(selection), "gap to the first"),
        tuple(
            (place, join(layers), join(l + 1 for l in layers), score, beam[0][1] - score)
            for place, (layers, score) in enumerate(beam, start=1)
        ),
        tuple(place for place, (layers, _) in enumerate(beam) if layers == selection.layers),
    )


def selections_table(calibration: Calibration, selections: Sequence[Selection]) -> Table:
    """The given selections beside each other, all with the raw `S_1` too, so that criteria can be compared."""
    grams = gram(calibration.states.astype(np.float64))
    return Table(
        "Selections",
        ("method", "layers", "boundaries", "criterion", "score", "S_1 (nats)"),
        tuple(
            (chooser(s), join(s.layers), join(s.boundaries), s.criterion, s.score,
             float(matrix_entropy(grams[list(s.layers)].sum(axis=0))))
            for s in selections
        ),
        (0,),
    )  # fmt: skip


def finding_tables(findings: Diagnostics) -> Iterable[Table]:
    """The numbers behind the diagnostics' sentences."""
    if (found := findings.stability) is not None:
        yield Table(
            f"Sets over {found.replicates} bootstrap replicates",
            (
                "layers",
                "share of replicates",
                "score (nats)",
                "2.5 % quantile",
                "97.5 % quantile",
                "shift of replicates",
            ),
            tuple((join(s.layers), s.frequency, s.score, s.low, s.high, s.shift) for s in found.sets),
            (0,),
        )
        yield Table(
            "Choice from a part of the samples",
            ("share of samples", "samples", "blocks", "layers", "score (nats)"),
            tuple((p.share, p.samples, p.blocks, join(p.layers), p.score) for p in found.convergence),
        )
    if (found := findings.overlap) is not None:
        yield Table(
            "Fixed rules among all sets of this size",
            ("rule", "layers", "score", "rank", "of", "percentile", "gap to the best", "layers that the beam holds"),
            tuple(
                (r.rule, join(r.place.layers), r.place.score, r.place.rank, r.place.total, r.place.percentile,
                 r.place.gap, join(r.held))
                for r in found.rules
            ),
        )  # fmt: skip
    if (found := findings.decomposition) is not None:
        yield Table(
            f"Parts of the entropy: informativeness {found.informativeness:.4f} + diversity {found.diversity:.4f} nats",
            ("layer", "weight", "own S_1 (nats)"),
            tuple((part.layer, part.weight, part.entropy) for part in found.parts),
        )
    if (found := findings.gains) is not None:
        yield Table(
            "What the set loses without a layer",
            ("layer", "score without it", "gain by it"),
            tuple((gain.layer, gain.score, gain.gain) for gain in found.without),
        )
    if (found := findings.sensitivity) is not None:
        yield Table(
            "The selected set under other settings",
            ("final state", "sinks", "weighting", "ρ", "α", "layers", "score"),
            tuple(
                (r.final_state, r.sinks, r.weighting, _short(r.rho), _short(r.alpha), join(r.layers), r.score)
                for r in found.measured
            ),
            tuple(place for place, row in enumerate(found.measured) if row == found.baseline),
        )


def record_tables(calibration: Calibration, selection: Selection) -> Iterable[Table]:
    """Settings, tallies and fingerprints: what it takes to make the same report again."""
    if calibration.settings is not None:
        yield _record("Settings of the calibration", asdict(calibration.settings))
    yield _record(f"Settings of the selection ({selection.method})", dict(selection.settings))
    yield _record("Tallies", calibration.summary)
    if calibration.checks:
        yield _record("Self-checks of the pass: greatest deviations", calibration.checks)
    yield _record(
        "Fingerprints",
        {
            "target": calibration.target_name,
            "target fingerprint": calibration.target_fingerprint,
            "target dtype": calibration.target_dtype,
            "fingerprint of the samples": calibration.data_fingerprint,
            "layerwave": version("layerwave"),
        },
    )


def _record(caption: str, entries: dict[str, Value]) -> Table:
    return Table(caption, ("what", "value"), tuple(entries.items()))


def _short(setting: float | None) -> str | None:
    return None if setting is None else f"{setting:g}"


def score_name(selection: Selection) -> str:
    """The criterion with its unit."""
    alpha = str(selection.settings.get("alpha", 1)).removesuffix(".0")
    return f"S_{alpha} (nats)" if selection.criterion == "entropy" else selection.criterion


def shown(value: Value) -> str:
    """A cell as text: four decimals, or as many digits as say something."""
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value):
        if value == 0 or 1e-3 <= abs(value) < 1e4:
            return f"{value:.4f}"
        return f"{value:.5f}" if 1e-4 <= abs(value) < 1e-3 else f"{value:.3e}"
    return str(value)
