"""The report: one HTML file that opens from a disk, without a network."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.files.writing import whole_file
from layerwave.report.acceptance import Progress, acceptance_section
from layerwave.report.pictures import pictures
from layerwave.report.tables import (
    beam_table,
    finding_tables,
    ids_table,
    layers_table,
    record_tables,
    score_name,
    selections_table,
    shown,
)
from layerwave.report.validation import validation_section
from layerwave.report.verdict import verdict
from layerwave.selection import Selection, chooser, diagnose, elsi
from layerwave.selection.sets import join
from layerwave.validation.result import Validation

TEMPLATES = resources.files("layerwave.report") / "templates"


def report_html(
    calibration: Calibration,
    selections: Sequence[Selection] = (),
    validation: Validation | None = None,
    *,
    progress: Progress | None = None,
) -> str:
    """The report on a calibration: the verdict on the first selection, figures, tables, settings, fingerprints.

    Args:
        calibration: what was measured.
        selections: choices from it, the one to judge first; without any, `elsi` chooses three layers, or as many as
            there are.
        validation: what drafts of many layer sets did: adds the section on whether the criterion predicts it.
        progress: of the one long part, predicted acceptance: called with the number of sets scored so far, and about
            how many there will be.

    Returns:
        A page that refers to nothing outside itself. All text from files is escaped, and the page's own policy allows
        no script but its own and no request.

    Raises:
        LayerwaveError: a selection or the validation was made from another calibration, or a layer's CKA is undefined.
    """
    for selection in selections:
        if selection.num_layers != calibration.num_layers:
            raise LayerwaveError(
                f"the selection {selection.method} is of {selection.num_layers} layers, but the calibration holds "
                f"{calibration.num_layers}: give selections made from this calibration"
            )
        if selection.calibration != calibration.fingerprint:
            raise LayerwaveError(
                f"the selection {selection.method} {join(selection.layers)} was chosen from the states and tokens "
                f"{selection.calibration}, but the calibration holds {calibration.fingerprint}: give selections made "
                "from this calibration"
            )
    if validation is not None and validation.calibration != calibration.fingerprint:
        raise LayerwaveError(
            f"the validation scored its layer sets with the calibration {validation.calibration}, but the calibration "
            f"given is {calibration.fingerprint}: give the one in the validation's folder"
        )
    selections = tuple(selections) or (elsi(calibration, min(3, calibration.num_layers)),)
    chosen = selections[0]
    try:
        section, unstudied = acceptance_section(calibration, selections, progress), ""
    except LayerwaveError as error:  # said in its section
        section, unstudied = None, str(error)
    findings = diagnose(calibration, chosen, beside=selections[1:])  # after the section, whose scores it may need
    drawn = pictures(calibration, selections)
    script = _read("report.js")
    return _template().render(
        calibration=calibration,
        chosen=chosen,
        chooser=chooser(chosen),
        score_name=score_name(chosen),
        verdict=verdict(calibration, chosen, findings, section and section.study),
        acceptance=section,
        unstudied=unstudied,
        validated=validation and validation_section(validation),
        ids=ids_table(chosen),
        pictures=drawn.drawn,
        tables=[
            selections_table(calibration, selections),
            beam_table(chosen),
            layers_table(calibration, chosen, findings),
            *finding_tables(findings),
        ],
        records=list(record_tables(calibration, chosen)),
        missing=[*findings.missing, *drawn.missing],
        needs=findings.sensitivity.needs if findings.sensitivity else (),
        style=Markup(_read("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_report(
    calibration: Calibration,
    path: str | Path,
    selections: Sequence[Selection] = (),
    validation: Validation | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Writes `report_html` to a file, whole or not at all. Raises `LayerwaveError` as it does, or for the file."""
    page = report_html(calibration, selections, validation, progress=progress)
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "join": join}
    environment.tests["number"] = lambda value: isinstance(value, int | float)
    return environment.get_template("report.html")


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
