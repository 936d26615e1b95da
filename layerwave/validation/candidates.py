"""The layer sets to train drafts for, and what every criterion says of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from math import comb

import numpy as np
from jaxtyping import Float, Int

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    CRITERIA,
    AcceptanceScores,
    SelectionSettings,
    check_layers,
    decompose,
    elsi,
    make_criterion,
    random_sets,
    rules,
    select,
)
from layerwave.selection.acceptance_study import sets_to_score
from layerwave.selection.criteria import ENTRY_POINTS
from layerwave.selection.sets import all_sets, check_size
from layerwave.validation.result import Candidate, Layers

METHODS = ("elsi", "elsi_c", "exhaustive", "low_entropy")
RULES = ("eagle2", "eagle3", "eagle3_engine", "uniform")
"""Fixed rules, each for the sizes that it has."""
BEAM = 10
"""Sets that the beam of predicted acceptance keeps."""
MOST_SETS = 100_000
"""Sets of one size from which random ones are drawn by score; of more sets so many are drawn evenly first."""

Names = dict[Layers, list[str]]


@dataclass(frozen=True)
class CandidateSettings:
    """Which layer sets are compared. Raises `LayerwaveError` for numbers out of range."""

    sizes: tuple[int, ...] = (1, 2, 3)
    """Numbers of layers for which every method chooses."""
    random: int = 8
    """Random sets of the largest size beside those of the methods, drawn over the whole range of the entropy."""
    acceptance_sets: int = 2
    """Best sets of each size that the beam of predicted acceptance adds."""
    layers: tuple[Layers, ...] = ()
    """Sets of the user's own: in place of all others, or beside them."""
    beside: bool = False
    """Compare the given layers with the sets of methods, rules and chance."""
    seed: int = 0
    """Of the random sets."""

    def __post_init__(self) -> None:
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise LayerwaveError(f"sizes are {list(self.sizes)}, expected at least one, each once")
        for name, least in (("random", 0), ("acceptance_sets", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise LayerwaveError(f"{name} is {getattr(self, name)}, expected at least {least}")

    @property
    def chosen(self) -> bool:
        """Whether methods, rules and chance choose sets."""
        return self.beside or not self.layers


@dataclass(frozen=True)
class Candidates:
    """Layer sets in ascending order of their sizes; notes say what could not be chosen or scored, and why."""

    sets: tuple[Candidate, ...]
    notes: tuple[str, ...]


def candidates(
    calibration: Calibration,
    settings: CandidateSettings | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Candidates:
    """The sets that methods, fixed rules, predicted acceptance and chance choose, each scored by every criterion.

    Sets that are chosen more than once stand once, with all names: `elsi`, `elsi_c`, `exhaustive`, `low_entropy`,
    `eagle2`, `eagle3`, `eagle3_engine`, `uniform`, `acceptance` (the choice of its beam), `acceptance_beam` (further
    sets that its beam kept), `random`, `given`.

    Args:
        calibration: of a target's pass, with a token sample.
        progress: called with the number of sets whose predicted acceptance is known, and about how many there will be.

    Raises:
        LayerwaveError: a size or given layers that the target does not have, fewer sets than random ones are asked
            for, and as `elsi` does. A rule that the target is too shallow for, and a criterion that this calibration
            cannot give, are notes.
    """
    settings = settings or CandidateSettings()
    notes: list[str] = []
    about = sets_to_predict(settings, calibration.num_layers)
    accepted = AcceptanceScores(calibration, progress=progress and (lambda done: progress(min(done, about), about)))
    names: Names = {}
    for layers in settings.layers:
        _name(names, check_layers(layers, calibration.num_layers), "given")
    if settings.chosen:
        for size in settings.sizes:
            _choose(calibration, check_size(size, calibration.num_layers), settings, accepted, names, notes)
        if settings.random:
            drawn = stratified_sets(calibration, max(settings.sizes), settings.random, settings.seed, without=names)
            for layers in drawn:
                _name(names, layers, "random")
    return described(calibration, names, accepted, notes)


def sets_to_predict(settings: CandidateSettings, num_layers: int) -> int:
    """Sets whose predicted acceptance is computed, about: those of one beam, and what others choose."""
    return (
        len(settings.layers)
        + (sets_to_score(num_layers, max(settings.sizes), BEAM) + settings.random) * settings.chosen
    )


def described(
    calibration: Calibration, names: Names, accepted: AcceptanceScores | None = None, notes: Sequence[str] = ()
) -> Candidates:
    """Layer sets, each with the names of those who chose it, scored by every criterion; in the order of their sizes."""
    ordered = sorted(names, key=len)
    found, missing = scores(calibration, ordered, accepted)
    parts = [decompose(calibration, layers) for layers in ordered]
    sets = tuple(
        Candidate(layers, tuple(names[layers]), own, part.informativeness, part.diversity)
        for layers, own, part in zip(ordered, found, parts, strict=True)
    )
    return Candidates(sets, (*notes, *missing))


def _name(names: Names, layers: Layers, name: str) -> None:
    known = names.setdefault(layers, [])
    if name not in known:
        known.append(name)


def _choose(
    calibration: Calibration,
    size: int,
    settings: CandidateSettings,
    accepted: AcceptanceScores,
    names: Names,
    notes: list[str],
) -> None:
    """Adds what methods, rules and predicted acceptance choose of one size."""
    for method in METHODS:
        _name(names, select(calibration, SelectionSettings(method, size)).layers, method)
    for rule in (rule for rule in rules(size) if rule in RULES):
        try:
            _name(names, select(calibration, SelectionSettings(rule, size)).layers, rule)
        except LayerwaveError as error:  # the rule does not fit a target this shallow: said, not replaced
            notes.append(str(error))
    try:
        chosen = elsi(calibration, size, BEAM, criterion=accepted)
    except LayerwaveError as error:
        notes.append(f"no sets of {size} layers by predicted acceptance: {error}")
        return
    _name(names, chosen.layers, "acceptance")
    others = [layers for layers, _ in chosen.beams[-1] if layers != chosen.layers]
    for layers in others[: settings.acceptance_sets - 1]:
        _name(names, layers, "acceptance_beam")


def stratified_sets(
    calibration: Calibration, size: int, count: int, seed: int, *, without: Iterable[Layers] = ()
) -> list[Layers]:
    """Random sets over the whole range of `S_1`: one from each of `count` strata of equal width in nats.

    A set drawn evenly from all of them would mostly have a middling score. For a stratum without a set one is drawn
    from the rest. The same for the same seed.

    Args:
        without: sets that shall not be drawn.

    Raises:
        LayerwaveError: there are fewer such sets.
    """
    num_layers = calibration.num_layers
    total = comb(num_layers, size)
    if total <= MOST_SETS:
        pool = np.concatenate(list(all_sets(num_layers, size)))
    else:
        pool = random_sets(num_layers, size, MOST_SETS, seed)
    taken = set(without)
    free = np.array([layers for layers in map(tuple, pool.tolist()) if layers not in taken]).reshape(-1, size)
    if len(free) < count:
        raise LayerwaveError(
            f"{count} random sets of {size} layers asked for, but only {len(free)} of {total} are not chosen already: "
            "ask for fewer"
        )
    _, score = make_criterion(calibration, "entropy", 1.0, "raw")
    drawn = draw_strata(score(free), count, np.random.default_rng(seed))
    return [tuple(layers) for layers in free[drawn].tolist()]


def draw_strata(scores: Float[np.ndarray, " M"], count: int, rng: np.random.Generator) -> Int[np.ndarray, " {count}"]:
    """Places of `count` scores, one from each stratum of equal width that holds any, the others from all that is left;
    in ascending order of the scores."""
    edges = np.linspace(scores.min(), scores.max(), count + 1)[1:-1]
    stratum = np.searchsorted(edges, scores, side="right")
    order = rng.permutation(len(scores))
    _, first = np.unique(stratum[order], return_index=True)
    rest = np.delete(np.arange(len(scores)), first)
    drawn = order[np.concatenate([first, rest[: count - len(first)]])]
    return drawn[np.argsort(scores[drawn], kind="stable")]


def scores(
    calibration: Calibration, sets: Sequence[Layers], accepted: AcceptanceScores | None = None
) -> tuple[list[dict[str, float]], list[str]]:
    """What every criterion says of each set, and notes on those that this calibration cannot give.

    By name: all of `CRITERIA` and of installed packages with their defaults, and the entropy read otherwise, one thing
    changed at a time: `entropy_trace` (every layer weighs the same), `entropy_no_filter` (all tokens),
    `entropy_sinks_dropped` (or `_kept`, where the calibration drops them), `entropy_alpha_2`, `entropy_alpha_inf`.
    """
    known = {"acceptance": accepted or AcceptanceScores(calibration)}
    installed = entry_points(group=ENTRY_POINTS).names
    readings: dict[str, Callable[[], Callable]] = {
        name: lambda name=name: make_criterion(calibration, known.get(name, name), 1.0, "raw")[1]
        for name in [*CRITERIA, *sorted(installed)]
    } | _readings_of_the_entropy(calibration)
    found: list[dict[str, float]] = [{} for _ in sets]
    notes = []
    for name, criterion in readings.items():
        try:
            values = _by_size(criterion(), sets)
        except LayerwaveError as error:
            if name == "entropy":
                raise
            notes.append(f"no scores by {name}: {error}")
            continue
        for own, value in zip(found, values.tolist(), strict=True):
            own[name] = value
    return found, notes


def _readings_of_the_entropy(calibration: Calibration) -> dict[str, Callable[[], Callable]]:
    def reading(alpha: float = 1.0, weighting: str = "raw", **pool) -> Callable[[], Callable]:
        def criterion():
            read = Calibration.from_states(calibration.pool(**pool)) if pool else calibration
            return make_criterion(read, "entropy", alpha, weighting)[1]

        return criterion

    readings = {
        "entropy_trace": reading(weighting="trace"),
        "entropy_alpha_2": reading(alpha=2.0),
        "entropy_alpha_inf": reading(alpha=float("inf")),
    }
    settings = calibration.settings
    if settings is not None:  # given states are one pool
        other = {"keep": "drop", "drop": "keep"}[settings.sinks]
        readings[f"entropy_sinks_{'dropped' if other == 'drop' else 'kept'}"] = reading(sinks=other)
        if settings.rho < 1:
            readings["entropy_no_filter"] = reading(filtered=False)
    return readings


def _by_size(criterion: Callable, sets: Sequence[Layers]) -> Float[np.ndarray, " M"]:
    """Scores of sets of any sizes by a criterion that takes sets of one."""
    values = np.empty(len(sets))
    for size in sorted(set(map(len, sets))):
        places = [i for i, layers in enumerate(sets) if len(layers) == size]
        values[places] = criterion(np.array([sets[i] for i in places]))
    return values
