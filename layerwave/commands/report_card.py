"""What `layerwave validate` prints and draws: layer sets, their accepted lengths by column, and the report card."""

from pathlib import Path

from layerwave.commands.printing import estimated, interval, join, print_table, table_of


def print_validation(validation, cards=None) -> None:
    """All tables of a validation, for each tree and temperature.

    Called by `layerwave validate` at its end, without `--json` (with it: `[card.record for card in cards]`).

    Args:
        validation: a `layerwave.validation.Validation`.
        cards: `report_cards(validation)`, where the caller has them already.
    """
    from layerwave.validation.accepted import accepted_lengths, set_lengths
    from layerwave.validation.report_card import report_cards

    cards = cards or report_cards(validation)
    for accepted, card in zip(accepted_lengths(validation.evaluations), cards, strict=True):
        lengths = set_lengths(accepted)
        measured = f"{_count(card.seeds, 'seed')}, {_count(card.questions, 'question')}"
        print(
            f"{card.nodes} nodes, temperature {card.temperature:g}: drafts of {validation.target} for "
            f"{len(validation.candidates)} layer sets, {measured}"
        )
        _print_sets(validation, lengths)
        _print_columns(validation, lengths, accepted.present)
        print_report_card(validation, card)
    for line in EXPLANATIONS:
        print(line)
    for note in validation.notes:
        print(f"note: {note}")


def draw_validation(validation, cards, folder: Path) -> list[Path]:
    """Writes the figures of a validation into its folder, those of its first tree and temperature: criteria.png and
    forest.png, and cascade.png where there was one.

    Called by `layerwave validate`; its report.html is `layerwave.report.write_report(calibration, folder /
    "report.html", validation=validation)` with the calibration of that folder.
    """
    from layerwave.report.figures.style import save_figure
    from layerwave.report.figures.validation import accepted_by_criteria, cascade_funnel, criteria_forest, names_of

    figures = {"criteria.png": accepted_by_criteria(validation, cards[0]), "forest.png": criteria_forest(cards[0])}
    if validation.stages:
        figures["cascade.png"] = cascade_funnel(validation.stages, names_of(validation))
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    return [folder / name for name in figures]


EXPLANATIONS = (
    "layers: outputs counted from 0; boundary = layer + 1; S_1 = own (informativeness) + χ (diversity)",
    "τ: tokens a verification round, mean over seeds; AVG: columns weighted by their questions; minus the mean: AVG "
    "minus that of all sets, paired, so that questions which are easy for all do not widen it",
    "[ ]: 95 %, bootstrap; of τ and speed-up over seeds and questions; of correlations first over seeds and questions "
    "with these sets, then over sets",
    "regret: AVG of the best set found minus that of the choice, the best looked for on halves of the measurements "
    "other than those that tell the difference; negative: the choice is better than what such a half finds",
)


def _print_sets(validation, lengths) -> None:
    table = table_of(
        "layers",
        "boundaries",
        "chosen by",
        "S_1 (nats)",
        "own",
        "χ",
        "τ AVG",
        "minus the mean",
        "τ of all rounds",
        "speed-up",
    )
    for candidate, own in zip(validation.candidates, lengths, strict=True):
        table.add_row(
            join(candidate.layers),
            join(candidate.boundaries),
            ", ".join(candidate.names),
            f"{candidate.entropy:.4f}",
            f"{candidate.informativeness:.4f}",
            f"{candidate.diversity:.4f}",
            estimated(own.average),
            estimated(own.apart, digits=3, sign="+"),
            estimated(own.overall),
            estimated(own.speedup),
        )
    print_table(table)


def _print_columns(validation, lengths, columns) -> None:
    table = table_of("τ of layers", *columns, "AVG")
    for candidate, own in zip(validation.candidates, lengths, strict=True):
        values = (*(own.columns[name] for name in columns), own.average)
        table.add_row(join(candidate.layers), *(f"{estimate.value:.2f}" for estimate in values))
    print_table(table)


def print_report_card(validation, card) -> None:
    """One report card: correlations over all sets and within sizes, then regret in every group."""
    from layerwave.validation.report_card import ALL, WITHIN

    for group in card.groups:
        if group.name in (ALL, WITHIN):
            ceiling = "" if group.ceiling is None else f" (noise ceiling: ρ about {group.ceiling:.2f})"
            print(f"report card, {group.name}{ceiling}")
            _print_group(group)
    _print_regret(validation, card)
    print(card.reading)
    for note in card.notes:
        print(f"note: {note}")
    print()


def _print_group(group) -> None:
    table = table_of(
        "criterion", "Spearman ρ with τ", "other sets", "Kendall", "ρ minus S_1's", "other sets", "beside S_1"
    )
    for own in ranked(group):
        table.add_row(
            own.criterion,
            *_correlation(own.spearman),
            "–" if own.kendall.value is None else f"{own.kendall.value:.2f}",
            *_correlation(own.beside),
            own.verdict or own.beside.missing,
        )
    print_table(table)


def _print_regret(validation, card) -> None:
    """A row for each criterion, a column for each group in which it chooses a set."""
    groups = [group for group in card.groups if group.chance is not None]
    table = table_of("choice and its regret", *(group.name for group in groups))
    for own in ranked(card.groups[0]):
        table.add_row(own.criterion, *(_choice(validation, group[own.criterion]) for group in groups))
    table.add_row("a random set", *(_regret(group.chance) for group in groups))
    table.add_row("best set found", *(join(validation.candidates[group.best].layers) for group in groups))
    print_table(table)


def _choice(validation, own) -> str:
    sets = [join(validation.candidates[place].layers) for place in own.choice]
    return f"{sets[0] if len(sets) == 1 else f'one of {len(sets)}'}: {_regret(own.regret)}"


def ranked(group):
    """Criteria by their correlation, greatest first; those without one last."""
    return sorted(
        group.criteria, key=lambda own: -2.0 if own.spearman.value is None else own.spearman.value, reverse=True
    )


def _correlation(found) -> tuple[str, str]:
    if found.value is None:
        return "–", "–"
    here = f" {interval(found.over_measurements)}" if found.over_measurements else ""
    return f"{found.value:.2f}{here}", interval(found.over_sets) if found.over_sets else "–"


def _regret(found) -> str:
    if found.value is None:
        return f"{found.measured:.3f} as measured"
    return f"{found.value:.3f}" + (f" {interval(found.interval, 3)}" if found.interval else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
