"""The selection's file and text."""

import json
import math
from dataclasses import replace

import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import METHODS, Selection, SelectionSettings, elsi, select, settings_of
from layerwave.selection.near_ties import warn_of_near_ties


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_states(problems.states(0, 8))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_name_survives_its_file(calibration, method, tmp_path):
    size = 1 if method == "eagle2" else 3
    selection = select(calibration, SelectionSettings(method=method, size=size))
    assert selection.method == method
    assert len(selection.layers) == size
    assert dict([selection.beams[-1][0]])[selection.layers] == selection.score
    selection.save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json") == selection
    assert [p.name for p in tmp_path.iterdir()] == ["selection.json"]


def test_infinite_order_is_standard_json(calibration):
    selection = elsi(calibration, 2, alpha=math.inf)
    json.loads(selection.to_json(), parse_constant=pytest.fail)
    assert Selection.from_json(selection.to_json()) == selection


def test_text_states_both_numberings(calibration):
    selection = select(calibration, SelectionSettings(method="eagle3"))
    assert selection.layers == (2, 4, 5)
    assert selection.boundaries == (3, 5, 6)
    assert repr(selection).startswith("Selection(eagle3: layers 2,4,5 of 0 … 7, boundaries 3,5,6, entropy ")
    assert "2,4,5" in str(selection).splitlines()[-1]
    assert json.loads(selection.to_json())["boundaries"] == [3, 5, 6]


def test_what_a_selection_shows():
    beams = ((((3,), 0.5),), (((0, 3), 1.25), ((2, 3), 0.75)))
    shown = Selection("elsi", (0, 3), 1.25, 8, "abc", "<score>", beams=beams)
    assert str(shown).splitlines() == [
        "Selection(elsi: layers 0,3 of 0 … 7, boundaries 1,4, <score> 1.2500)",
        "          layers       boundaries    <score>",
        "             0,3              1,4     1.2500",
        "             2,3              3,4     0.7500",
    ]
    assert "<tr><td>2,3</td><td>3,4</td><td>0.7500</td></tr></table>" in shown._repr_html_()
    assert "<th>&lt;score&gt;</th>" in shown._repr_html_()
    assert len(str(replace(shown, beams=())).splitlines()) == 2
    assert "<td>" not in replace(shown, beams=())._repr_html_()


@pytest.mark.parametrize(
    ("criterion", "behind", "near"),
    [
        ("entropy", 9e-6, True),
        ("entropy", -9e-6, True),
        ("entropy", 1.1e-5, False),
        ("acceptance", 9e-5, True),
        ("acceptance", 1.1e-4, False),
    ],
)
def test_sets_as_near_as_a_pass_is_exact_are_said(criterion, behind, near, caplog):
    warn_of_near_ties((1,), ((((1,), 2.0), ((0,), 2.0 - behind), ((3,), 1.0)),), criterion)
    assert ("near tie: 1 and 0 differ by less than" in caplog.text) == near


def test_near_ties_are_named_up_to_three_and_only_of_a_set_in_the_beam(caplog):
    beam = tuple(((layer,), 2.0) for layer in range(6))
    warn_of_near_ties((7,), (beam,), "entropy")
    assert not caplog.text
    warn_of_near_ties((2,), (beam,), "entropy")
    assert "near tie: 2 and 0 and 1 and 3 differ by" in caplog.text


def test_low_entropy_is_not_above_elsi(calibration):
    low, high = (select(calibration, SelectionSettings(method=m)) for m in ("low_entropy", "elsi"))
    assert low.score < high.score
    assert low.beams[-1] == tuple(sorted(low.beams[-1], key=lambda entry: entry[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(version=2), "schema version 2, this layerwave reads 1"),
        (lambda r: r.update(schema="other"), "not a selection"),
        (lambda r: r.pop("score"), "damaged"),
        (lambda r: r.update(score="high"), "damaged"),
        (lambda r: r.update(layers=[1, 1]), "layer 1 is repeated"),
        (lambda r: r.update(layers=[1, 8]), "layer 8 is out of range"),
        (lambda r: r.update(layers=3), "damaged"),
        (lambda r: r.update(beams=[3]), "damaged"),
        (lambda r: r.update(settings=[]), "damaged"),
        (lambda r: r.update(layers=[0, 1], boundaries=[1, 2]), r"last beam does not hold the layers \[0, 1\]"),
        (lambda r: r.update(boundaries=r["layers"]), "boundaries are"),
        (lambda r: r["beams"][0][0].update(parents=[0]), "parents beyond the 0 sets"),
        (lambda r: r["beams"][1][0].update(parents=[-1]), "parents beyond the 8 sets"),
        (lambda r: r["beams"][1][0].update(parents=[7, 8]), "parents beyond the 8 sets"),
        (lambda r: r["beams"][1][-1].update(parents=[]), "reached from no set"),
        (lambda r: r["beams"].append([]), "a beam is empty"),
        (lambda r: r["beams"][0][-1].update(score=math.inf), "a score is not finite"),
        (lambda r: r["beams"][0][-1].update(layers=[8]), "layer 8 is out of range"),
    ],
)
def test_damaged_files(calibration, change, message, tmp_path):
    record = json.loads(elsi(calibration, 2).to_json())
    change(record)
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(record))
    with pytest.raises(LayerwaveError, match=message):
        Selection.load(path)


def test_files_that_are_not_json_or_not_there(calibration, tmp_path):
    path = tmp_path / "selection.json"
    path.write_text('{\n"schema": ')
    with pytest.raises(LayerwaveError, match="line 2"):
        Selection.load(path)
    with pytest.raises(LayerwaveError, match="cannot be read"):
        Selection.load(tmp_path / "absent.json")
    with pytest.raises(LayerwaveError, match="cannot be written"):
        elsi(calibration, 2).save(tmp_path / "absent" / "selection.json")


@pytest.mark.parametrize("option", [{"depth": 3}, {"method": "elsi"}, {"weighting": 2}, {"beam": "10"}])
def test_options_that_no_method_has_are_named(calibration, option):
    ((name, value),) = option.items()
    damaged = replace(elsi(calibration, 2), settings=option)
    with pytest.raises(LayerwaveError, match=f"option {name} = {value!r} is not one of a method"):
        settings_of(damaged)


def test_unknown_method_lists_the_known(calibration):
    with pytest.raises(LayerwaveError, match="elsi, elsi_c, exhaustive, low_entropy, eagle2"):
        select(calibration, SelectionSettings(method="best"))
