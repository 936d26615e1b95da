"""The report's section on a validation: does the criterion predict acceptance?"""

from collections.abc import Iterator
from dataclasses import dataclass

from layerwave.decoding.tau import Estimate
from layerwave.report.figures.validation import (
    accepted_by_criteria,
    accepted_by_other_criteria,
    cascade_funnel,
    criteria_forest,
    names_of,
)
from layerwave.report.pictures import Picture, Pictures
from layerwave.report.tables import Table, Value
from layerwave.selection.sets import join
from layerwave.validation.accepted import Accepted, SetLengths, accepted_lengths, set_lengths
from layerwave.validation.correlations import Correlation, Interval
from layerwave.validation.regret import Regret
from layerwave.validation.report_card import WITHIN, GroupCard, ReportCard, report_cards
from layerwave.validation.result import Layers, Validation


@dataclass(frozen=True)
class Section:
    """What stands in the section."""

    validation: Validation
    cards: tuple[ReportCard, ...]
    readings: dict[str, str]
    pictures: list[Picture]
    tables: list[Table]
    notes: tuple[str, ...]


def validation_section(validation: Validation) -> Section:
    """Report cards of a validation with their figures and tables. Raises `LayerwaveError` as `report_cards` does."""
    cards = report_cards(validation)
    page = Pictures("validation")
    tables: list[Table] = []
    for card, accepted in zip(cards, accepted_lengths(validation.evaluations), strict=True):
        where = condition(card)
        _draw(page, validation, card, where)
        tables.append(_sets_table(validation, accepted, set_lengths(accepted), where))
        tables += [_group_table(validation, group, where) for group in card.groups]
    if validation.stages:
        page.add("The cascade", lambda: (cascade_funnel(validation.stages, names_of(validation)), FUNNEL), wide=True)
        tables.append(_cascade_table(validation))
    return Section(
        validation,
        cards,
        {condition(card).capitalize(): card.reading for card in cards},
        page.drawn,
        [*tables, *_records(validation)],
        tuple(dict.fromkeys((*validation.notes, *(note for card in cards for note in card.notes)))),
    )


def condition(card: ReportCard) -> str:
    """What a report card is for."""
    return f"{card.nodes} nodes, temperature {card.temperature:g}"


BY_CRITERIA = (
    "τ of every set's drafts, minus the mean of all sets, against raw entropy and predicted acceptance; bars are "
    "paired 95 % intervals over seeds and questions, ρ is Spearman's. A criterion that predicts τ shows a rising line, "
    "and one that helps to choose layers of a given number shows it within each colour."
)
BY_OTHERS = (
    "The same sets against every other score. Held-out acceptance is measured on the trained drafts: no criterion."
)
FOREST = (
    "How well each criterion ranks the sets. Broad bars: what other seeds and questions would change; thin bars: other "
    "sets. Green predicts τ better than raw S_1 by both, red worse. Dashed: about what the true τ itself would reach, "
    "since the measured one is noisy."
)
FUNNEL = "Rank of every set at every stage; a line goes on while the set stays, a cross is where it left."


def _draw(page: Pictures, validation: Validation, card: ReportCard, where: str) -> None:
    page.add(f"τ against criteria, {where}", lambda: (accepted_by_criteria(validation, card), BY_CRITERIA), wide=True)
    page.add(f"Correlation with τ, {where}", lambda: (criteria_forest(card), FOREST), wide=True)
    others = f"τ against the other scores, {where}"
    page.add(others, lambda: (accepted_by_other_criteria(validation, card), BY_OTHERS), wide=True)


def _sets_table(validation: Validation, accepted: Accepted, lengths: tuple[SetLengths, ...], where: str) -> Table:
    columns = accepted.present
    rows = tuple(
        (
            join(c.layers), join(c.boundaries), ", ".join(c.names), c.entropy, c.informativeness, c.diversity,
            *_estimate(own.average), *_estimate(own.apart), *(own.columns[name].value for name in columns),
            *_estimate(own.overall), *_estimate(own.speedup),
        )
        for c, own in zip(validation.candidates, lengths, strict=True)
    )  # fmt: skip
    best = max(range(len(lengths)), key=lambda m: lengths[m].average.value)
    return Table(
        f"Layer sets and accepted lengths τ, {where}",
        ("layers", "boundaries", "chosen by", "S_1 (nats)", "informativeness", "diversity χ", "τ AVG", "95 %",
         "minus the mean", "95 %",
         *(f"τ {name}" for name in columns), "τ of all rounds", "95 %", "speed-up", "95 %"),
        rows,
        (best,),
    )  # fmt: skip


def _group_table(validation: Validation, group: GroupCard, where: str) -> Table:
    ceiling = "" if group.ceiling is None else f"; noise ceiling {group.ceiling:.2f}"
    over = ("seeds, questions", "other sets")
    columns = ["criterion", "Spearman ρ", *over, "Kendall τ-b", "ρ minus S_1's", *over, "beside S_1"]
    rows: list[tuple[Value, ...]] = [
        (own.criterion, *_correlation(own.spearman), own.kendall.value, *_correlation(own.beside),
         own.verdict or own.beside.missing)
        for own in group.criteria
    ]  # fmt: skip
    if group.chance is not None:
        columns += ["chooses", "regret", "95 %", "regret as measured"]
        rows = [
            (*row, _choice(validation, own.choice), *_regret(own.regret))
            for row, own in zip(rows, group.criteria, strict=True)
        ]
        rows.append(("a random set", *(None,) * 8, "any", *_regret(group.chance)))
    best = join(validation.candidates[group.best].layers)
    sets = f"{len(group.members)} sets" + (", each among those of its size" if group.name == WITHIN else "")
    return Table(
        f"Report card, {group.name}, {where} ({sets}; best set found {best}{ceiling})", tuple(columns), tuple(rows)
    )


def _estimate(estimate: Estimate) -> tuple[Value, ...]:
    bounds = None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)
    return estimate.value, _interval(bounds)


def _correlation(found: Correlation) -> tuple[Value, ...]:
    return found.value, _interval(found.over_measurements), _interval(found.over_sets)


def _choice(validation: Validation, places: tuple[int, ...]) -> str:
    sets = [join(validation.candidates[place].layers) for place in places]
    return sets[0] if len(sets) == 1 else f"one of {len(sets)}"


def _regret(found: Regret) -> tuple[Value, ...]:
    return found.value, _interval(found.interval), found.measured


def _interval(bounds: Interval | None) -> str | None:
    """On one line."""
    return None if bounds is None else f"{bounds[0]:.2f}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{bounds[1]:.2f}"


def _cascade_table(validation: Validation) -> Table:
    """Every set with the last stage that compared it, the finalists first."""
    rows: dict[Layers, tuple[Value, ...]] = {}
    for number, stage in enumerate(validation.stages, 1):
        for rank, found in enumerate(stage.standings, 1):
            fate = "stays" if found.stays else "left"
            measure = f"{number}. {stage.measure}" + (f", {stage.steps:,} steps" if stage.steps else "")
            rows.pop(found.layers, None)
            rows[found.layers] = (
                join(found.layers), measure, rank, fate, found.value, found.behind, found.standard_error, found.why
            )  # fmt: skip
    ordered = sorted(rows.values(), key=lambda row: (row[3] != "stays", -int(str(row[1]).partition(".")[0]), row[2]))
    finalists = sum(found.stays for found in validation.stages[-1].standings)
    return Table(
        "The cascade: where each set was compared last",
        ("layers", "stage", "rank", "fate", "acceptance", "minus the best", "standard error", "why"),
        tuple(ordered),
        tuple(range(finalists)),
    )


def _records(validation: Validation) -> Iterator[Table]:
    """What the validation took, and what it takes to make it again."""
    if validation.cost:
        yield Table("Cost of the cascade", ("what", "draft-steps"), tuple(validation.cost.items()))
    if validation.seconds:
        yield Table("Seconds by stage", ("stage", "seconds"), tuple(validation.seconds.items()))
    entries = {
        "seeds of the trainings": join(validation.seeds),
        "fingerprint of the calibration": validation.calibration,
        "fingerprint of the training data": validation.data,
        "fingerprint of the questions": validation.evaluations[0].questions,
    }
    yield Table("Settings of the validation", ("what", "value"), (*entries.items(), *_flat(validation.settings)))


def _flat(settings, above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)
