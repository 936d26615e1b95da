"""The page: all that it must say, nothing from outside, nothing that a file could smuggle in; and a real browser."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from page import Page

from layerwave import cli
from layerwave.calibration import Calibration
from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.errors import LayerwaveError
from layerwave.interop import layer_ids_table
from layerwave.report import report_html, write_report
from layerwave.selection import Selection, SelectionSettings, elsi, elsi_c, select
from layerwave.selection.stability import stability
from tests.token_samples import planted_tokens

EVIL = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$\\frac$ _&"


@pytest.fixture(scope="module")
def selections(planted):
    return [elsi_c(planted, 3), elsi(planted, 2), select(planted, SelectionSettings("eagle3_engine", 3))]


@pytest.fixture(scope="module")
def text(planted, selections):
    return report_html(planted, selections)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_verdict_stands_first(page, selections):
    chosen = selections[0]
    verdict, figures = page.text.index("Verdict\n"), page.text.index("Figures\n")
    assert verdict < page.text.index(",".join(map(str, chosen.layers))) < page.text.index("Warnings") < figures
    assert "unknown: this calibration holds no bootstrap replicates" in page.text
    rows = page.tables["Layer ids for each tool"][1:]
    for row, expected in zip(rows, layer_ids_table(chosen.layers, 9), strict=True):
        assert row[0] == expected.title
        assert row[1] == ("refused" if expected.ids is None else str(list(expected.ids)))


def test_every_figure_and_table_is_there(page, selections, planted):
    # Those of the page; a figure holds no SVG inside its SVG.
    assert len(page.attributes["svg"]) == 9
    assert all(len(svg["aria-label"]) > 40 and svg["role"] == "img" for svg in page.attributes["svg"])
    layers = page.tables["Layers"]
    assert [row[0] for row in layers[1:]] == [str(l) for l in range(9)]
    beam = page.tables["Sets that elsi_c kept last"][1:]
    assert [row[1] for row in beam] == [",".join(map(str, layers)) for layers, _ in selections[0].beams[-1]]
    assert [row[0] for row in page.tables["Selections"][1:]] == ["elsi_c", "elsi", "eagle3_engine"]
    settings = dict(page.tables["Settings of the calibration"][1:])
    assert settings["rho"] == "0.3000"
    assert dict(page.tables["Fingerprints"][1:])["fingerprint of the samples"] == planted.data_fingerprint
    assert dict(page.tables["Tallies"][1:])["blocks"] == "5"


def test_the_page_refers_to_nothing_outside(text, page):
    assert len(text.encode()) < 5e6
    assert 'id="validation"' not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    for attributes in (a for tag in page.attributes.values() for a in tag):
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
        for url in re.findall(r"url\(([^)]*)\)", " ".join(filter(None, attributes.values()))):
            assert url.startswith("#")


def test_ids_are_unique_and_references_lead_to_them(page):
    every = [attributes for tag in page.attributes.values() for attributes in tag]
    ids = [attributes["id"] for attributes in every if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {a["href"][1:] for a in every if a.get("href", "").startswith("#")}
    used |= {url for a in every for url in re.findall(r"url\(#([^)]*)\)", " ".join(filter(None, a.values())))}
    used |= {a["aria-labelledby"] for a in every if "aria-labelledby" in a}
    assert used <= set(ids)


def test_the_policy_allows_the_page_s_own_script_alone(page):
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(m["content"] for m in page.attributes["meta"] if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert policy.endswith(f"script-src 'sha256-{digest}'")


def test_the_same_input_gives_the_same_page(planted, selections, text):
    assert report_html(planted, selections) == text


def test_text_from_files_is_escaped(planted):
    calibration = replace(planted, target_name=EVIL, target_fingerprint=EVIL, tallies={EVIL: 1})
    chosen = elsi(planted, 2)
    record = json.loads(chosen.to_json()) | {"method": EVIL, "criterion": EVIL, "settings": {EVIL: EVIL}}
    text = report_html(calibration, [Selection.from_json(json.dumps(record))])
    page = Page(text)
    assert len(page.scripts) == 1
    assert "img" not in page.attributes
    assert EVIL in page.text
    assert "alert(1)</script>" not in text
    for shown in (calibration, Selection.from_json(json.dumps(record))):
        assert "<script" not in shown._repr_html_()
        assert Page(shown._repr_html_()).attributes.keys() <= {"table", "caption", "tr", "td", "th"}


def test_stability_is_told_when_there_are_replicates(planted):
    rng, replicates = np.random.default_rng(0), 8
    noise = 0.3 * rng.normal(size=(len(planted.lengths), *planted.states.shape))
    sample_sums = planted.sample_blocks[:, None, None, None] * (planted.states + noise)
    weights = sample_weights(planted.fingerprints, replicates, seed=0).astype(np.float64)
    sums = np.einsum("cs,snbd->cnbd", weights, sample_sums).astype(np.float32)
    calibration = replace(
        planted,
        settings=replace(planted.settings, replicates=replicates),
        replicates=Replicates.from_sums(sums, limit=100.0),
    )
    chosen = elsi(calibration, 3)
    found = stability(calibration, 3)
    page = Page(report_html(calibration, [chosen, elsi_c(calibration, 2)]))
    assert found.reading in page.text
    assert "unknown" not in page.text[: page.text.index("Figures\n")]
    rows = page.tables[f"Sets over {found.replicates} bootstrap replicates"][1:]
    assert rows[0][:2] == [",".join(map(str, chosen.layers)), f"{found.frequency:.4f}"]
    assert len(page.tables["Layers"][0]) == 6
    np.testing.assert_allclose([float(r[5]) for r in page.tables["Layers"][1:]], found.layer_frequency, atol=1e-4)


def test_given_states_say_what_is_missing(planted):
    page = Page(report_html(Calibration.from_states(planted.states)))
    assert len(page.attributes["svg"]) == 5
    for title in ("Single prompts", "Variance over prompts", "CKA with the entropy filter and without"):
        assert title in page.text
    assert page.text.count("without samples") == 2


def test_a_selection_of_another_target_is_refused(planted):
    other = elsi(Calibration.from_states(planted.states[:5]), 2)
    with pytest.raises(LayerwaveError, match=r"elsi is of 5 layers, but the calibration holds \d"):
        report_html(planted, [other])


def test_a_selection_by_another_token_sample_is_refused(planted):
    """The block sums are the same, but its predicted acceptance is not this one."""
    here, there = (replace(planted, tokens=planted_tokens(planted.num_layers, (0, 3), seed=seed)) for seed in range(2))
    with pytest.raises(LayerwaveError, match=r"elsi \d was chosen from the states and tokens"):
        report_html(here, [elsi(there, 1, criterion="acceptance")])


def test_the_file_is_written_whole(planted, tmp_path):
    with pytest.raises(LayerwaveError, match="cannot be written"):
        write_report(planted, tmp_path / "no" / "report.html")
    assert not list(tmp_path.iterdir())


def test_the_command(planted, selections, tmp_path, capsys):
    planted.save(tmp_path / "cal.safetensors")
    selections[0].save(tmp_path / "selection.json")
    paths = [str(tmp_path / name) for name in ("cal.safetensors", "selection.json", "report.html")]
    cli.main(["report", *paths[:2], "--out", paths[2], "--json"])
    assert json.loads(capsys.readouterr().out) == {"out": paths[2]}
    assert "Chosen by <b>elsi_c</b>" in (tmp_path / "report.html").read_text()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on the path")


def browse(path, tmp_path):
    """Opens a file in a browser without a window: the page after its script, console lines, requested addresses."""
    flags = (
        "--headless --no-sandbox --disable-gpu --enable-logging=stderr --disable-background-networking "
        "--disable-component-update --disable-sync --no-first-run --virtual-time-budget=2000 --dump-dom"
    )
    log = tmp_path / "net.json"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    # One event a line; what the browser asks for on its own account has "not an origin".
    asked = [line for line in log.read_text().splitlines() if '"initiator":"' in line and "not an origin" not in line]
    return done.stdout, console, {url for line in asked for url in re.findall(r'"url":"([^"]*)"', line)}


def with_probe(text: str, probe: str, *, allowed: bool) -> str:
    """The page with a line added to its script, and to the policy when it is allowed."""
    (script,) = Page(text).scripts
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in (script, script + probe)]
    text = text.replace(f"<script>{script}", f"<script>{script}{probe}")
    return text.replace(*digests) if allowed else text


@needs_chromium
def test_in_a_browser_nothing_fails_and_nothing_is_requested(text, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(text)
    dom, console, requested = browse(path, tmp_path)
    assert not console
    assert not requested
    assert 'id="verdict"' in dom


@needs_chromium
def test_in_a_browser_text_from_files_stays_text(planted, tmp_path):
    """Every text that a file brings holds a script and an image, and the page has neither, policy or not."""
    calibration = replace(planted, target_name=EVIL, target_fingerprint=EVIL, tallies={EVIL: 1})
    record = json.loads(elsi(planted, 2).to_json()) | {"method": EVIL, "criterion": EVIL, "settings": {EVIL: EVIL}}
    text = report_html(calibration, [Selection.from_json(json.dumps(record))])
    path = tmp_path / "report.html"
    path.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))
    dom, console, requested = browse(path, tmp_path)
    assert not console
    assert not requested
    page = Page(dom)
    assert len(page.attributes["script"]) == 1
    assert "img" not in page.attributes
    assert EVIL in page.text


@needs_chromium
def test_a_request_would_have_been_seen(tmp_path):
    path = tmp_path / "other.html"
    path.write_text('<!doctype html><title>other</title><img src="http://127.0.0.1:9/picture.png">')
    _, _, requested = browse(path, tmp_path)
    assert requested == {"http://127.0.0.1:9/picture.png"}


@needs_chromium
def test_in_a_browser_tables_sort_by_number_and_back(text, tmp_path):
    header = "[...document.querySelectorAll('caption')].find(c => c.textContent == 'Layers').parentNode.tHead.rows[0]"
    click = f"{header}.cells[2].firstElementChild.click();"
    for clicks, way in ((1, "ascending"), (2, "descending")):
        path = tmp_path / f"{way}.html"
        path.write_text(with_probe(text, click * clicks, allowed=True))
        dom, console, _ = browse(path, tmp_path)
        assert not console
        entropies = np.array([float(row[2]) for row in Page(dom).tables["Layers"][1:]])
        assert (np.diff(entropies) * (1 if way == "ascending" else -1) >= 0).all()
        assert f'aria-sort="{way}"' in dom


@needs_chromium
def test_in_a_browser_a_foreign_script_does_not_run(text, tmp_path):
    path = tmp_path / "foreign.html"
    path.write_text(with_probe(text, "document.title = 'taken over';", allowed=False))
    dom, console, _ = browse(path, tmp_path)
    assert "taken over</title>" not in dom
    assert any("Content Security Policy" in line for line in console)
