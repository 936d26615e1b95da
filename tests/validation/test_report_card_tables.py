"""What `layerwave validate` prints of a validation."""

from layerwave.commands.report_card import draw_validation, print_validation
from layerwave.validation.accepted import accepted_lengths, set_lengths
from layerwave.validation.report_card import report_cards
from tests.validations import NAMES, SETS, planted_validation


def test_the_tables(capsys):
    validation = planted_validation(seeds=2)
    cards = report_cards(validation)
    print_validation(validation, cards)
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    for accepted, card in zip(accepted_lengths(validation.evaluations), cards, strict=True):
        assert f"{card.nodes} nodes, temperature 0: drafts of planted for 17 layer sets, 2 seeds, 26 questions" in text
        assert card.reading in text
        for layers, own in zip(SETS, set_lengths(accepted), strict=True):
            name = ",".join(map(str, layers))
            tau = f"{own.average.value:.2f} [{own.average.low:.2f}, {own.average.high:.2f}]"
            apart = f"{own.apart.value:+.3f} [{own.apart.low:.3f}, {own.apart.high:.3f}]"
            assert any(
                row[0] == name and row[2] == ", ".join(NAMES.get(layers, ("random",))) and tau in row and apart in row
                for row in rows
                if len(row) > 3
            )
            assert any(row[0] == name and row[-1] == f"{own.average.value:.2f}" for row in rows if len(row) == 13)
        found = card["all sets"]["acceptance"].spearman
        cell = "{:.2f} [{:.2f}, {:.2f}]".format(found.value, *found.over_measurements)
        assert any(row[:2] == ["acceptance", cell] and row[-1] == "better" for row in rows if len(row) > 2)
        chosen = ",".join(map(str, SETS[card["all sets"]["entropy"].choice[0]]))
        regret = card["all sets"]["entropy"].regret
        cell = "{}: {:.3f} [{:.3f}, {:.3f}]".format(chosen, regret.value, *regret.interval)
        assert any(row[:2] == ["entropy", cell] for row in rows)
    assert "one of 4: " in text  # single layers score alike by dpp
    order = [row[0] for row in rows if len(row) > 5 and row[0] in ("acceptance", "entropy", "backwards")]
    assert order[:3] == ["acceptance", "entropy", "backwards"]  # by their correlation
    assert "nan" not in text.lower()


def test_the_figures(tmp_path):
    validation = planted_validation(seeds=2, nodes=(60,))
    written = draw_validation(validation, report_cards(validation), tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert {path.name for path in written} == {"criteria.png", "forest.png", "cascade.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
