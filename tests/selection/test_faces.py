"""What all public names of the room share: the same defaults wherever an option stands, results that do not change."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
from jaxtyping import AbstractArray

from layerwave import selection
from layerwave.selection import CRITERIA, SelectionSettings

DEFAULTS = {field.name: field.default for field in dataclasses.fields(SelectionSettings)}
FUNCTIONS = {name: face for name in selection.__all__ if inspect.isfunction(face := getattr(selection, name))}
NAMES = [found.name for found in pkgutil.iter_modules(selection.__path__)]
ROOM = [importlib.import_module(f"{selection.__name__}.{name}") for name in NAMES]
DATA = {face for module in ROOM for face in vars(module).values() if dataclasses.is_dataclass(face)}


def test_defaults_are_those_of_the_method():
    assert (DEFAULTS["beam"], DEFAULTS["expand"], DEFAULTS["pool"]) == (10, 10, 5)
    assert (DEFAULTS["size"], DEFAULTS["alpha"]) == (3, 1.0)
    assert (DEFAULTS["weighting"], DEFAULTS["estimator"]) == ("raw", "biased")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_an_option_has_one_default_everywhere(name):
    for option, parameter in inspect.signature(FUNCTIONS[name]).parameters.items():
        if option in DEFAULTS and parameter.default is not parameter.empty:
            # `random_sets` and the fixed rules have sizes of their own; `method` is chosen.
            assert parameter.default in (DEFAULTS[option], None), option
    if FUNCTIONS[name] in CRITERIA.values():
        assert inspect.signature(FUNCTIONS[name]).parameters["alpha"].default == DEFAULTS["alpha"]


def test_no_result_can_be_changed():
    assert len(DATA) > 30
    assert not [face.__name__ for face in DATA if not face.__dataclass_params__.frozen]


def test_public_results_that_hold_arrays_compare_as_themselves():
    """`==` of arrays is an array: a result that compared its fields could neither be compared nor stand in a set."""
    holding = [
        face
        for face in DATA
        if face.__name__ in selection.__all__
        and any(inspect.isclass(f.type) and issubclass(f.type, AbstractArray) for f in dataclasses.fields(face))
    ]
    assert len(holding) >= 5
    assert not [face.__name__ for face in holding if face.__dataclass_params__.eq]
