"""`layerwave evaluate`."""

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from layerwave.commands.printing import Json, check_out, estimated, print_json, print_table, progress_bar, table_of
from layerwave.errors import LayerwaveError
from layerwave.targets import DTypeName


@dataclass(frozen=True)
class Evaluate:
    """Measure accepted lengths and speed-ups of drafts on Spec-Bench's questions. An interrupted run goes on."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    drafts: Annotated[Positional[tuple[Path, ...]], arg(metavar="DRAFT ...")]
    """Directories of drafts that layerwave trained or imported."""
    out: Path
    """The evaluation.json to write."""
    questions: Path | None = None
    """Rows of question_id, category and turns, such as Spec-Bench's question.jsonl; by default 26 bundled questions."""
    nodes: str = "30,60"
    """Sizes of the draft trees, the root included."""
    temperature: str = "0,1"
    """Temperatures, 0 being greedy."""
    max_new_tokens: int = 1024
    """Tokens of an answer at most."""
    batch: int = 1
    """Questions answered together; speed-ups are usually stated for one."""
    seed: int = 0
    """Of the samples."""
    samples_per_category: int | None = None
    """Ask only the first questions of each category."""
    depth: int = 8
    """Drafted tokens of a tree's longest path."""
    top_k: int = 10
    """Children of a node that are considered; 1 makes chains, whose nodes are depth + 1."""
    dtype: DTypeName = "float32"
    """Parameters and activations of target and drafts; norms and softmax are float32 in any case."""
    figure: Path | None = None
    """Draw accepted lengths and acceptance by depth to this .png or .svg."""
    json: Json = False

    def run(self) -> None:
        import jax.numpy as jnp

        from layerwave.decoding.evaluate import evaluate
        from layerwave.decoding.evaluation import EvaluationSettings
        from layerwave.decoding.questions import BUNDLED
        from layerwave.decoding.tau import summarize
        from layerwave.drafts import load_draft
        from layerwave.targets import load_target

        settings = EvaluationSettings(
            nodes=_numbers("nodes", self.nodes, int),
            temperatures=_numbers("temperature", self.temperature, float),
            max_new_tokens=self.max_new_tokens,
            batch=self.batch,
            seed=self.seed,
            samples_per_category=self.samples_per_category,
            depth=self.depth,
            top_k=self.top_k,
        )
        questions = self.questions or BUNDLED
        for path in (self.out, *([self.figure] if self.figure else [])):
            check_out(path, questions)
        drafts = {
            name: load_draft(path, jnp.dtype(self.dtype))
            for name, path in zip(_names(self.drafts), self.drafts, strict=True)
        }
        target = load_target(self.target, self.dtype)
        with progress_bar(f"evaluating drafts of {self.target}") as progress:
            evaluation = evaluate(target, drafts, self.out, settings, questions=questions, progress=progress)
        if self.figure is not None:
            from layerwave.report.figures.acceptance_lengths import acceptance_lengths
            from layerwave.report.figures.style import save_figure

            save_figure(acceptance_lengths(evaluation), self.figure)
        summaries = summarize(evaluation)
        _warn(summaries)
        if self.json:
            runs = [dataclasses.asdict(summary) for summary in summaries]
            print_json({"out": str(self.out), **evaluation.header, "summaries": runs})
            return
        print_evaluation(evaluation, summaries)
        print(f"wrote {', '.join(str(path) for path in (self.out, self.figure) if path)}")


def _numbers(name: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise LayerwaveError(f"{name} {text!r} are not {what} between commas; write for example 30,60") from None


def _names(paths: tuple[Path, ...]) -> list[str]:
    """What tables call the drafts: their folders' names, or whole paths where those are not unique."""
    resolved = Counter(path.resolve() for path in paths)
    if repeated := [str(path) for path, count in resolved.items() if count > 1]:
        raise LayerwaveError(f"the draft {repeated[0]} is named twice: name each once")
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _warn(summaries) -> None:
    """Lossless decoding that was not: on stderr, whatever is printed."""
    for summary in summaries:
        if summary.differing:
            id, turn, place = summary.differing[0]
            print(
                f"layerwave: warning: {summary.draft}, {summary.nodes} nodes, temperature {summary.temperature:g}: "
                f"{len(summary.differing)} of {summary.answers} answers are not those of plain decoding (first: "
                f"question {id}, turn {turn + 1}, token {place + 1}). Where two tokens are almost equal, rounding "
                "decides, more often in bfloat16; many such answers are a fault",
                file=sys.stderr,
            )


def print_evaluation(evaluation, summaries) -> None:
    from layerwave.decoding.questions import COLUMNS

    print(f"τ, tokens a verification round, of drafts of {evaluation.target} ({len(evaluation.ids)} questions)")
    table = table_of("draft", "nodes", "T", *COLUMNS, "AVG")
    for summary in summaries:
        found = [summary.columns.get(name) for name in COLUMNS]
        table.add_row(
            *_run(summary),
            *("–" if group is None else f"{group.tau.value:.2f}" for group in found),
            f"{summary.average.value:.2f}",
        )
    print_table(table)
    statistics = ("τ of all rounds", "mean of questions", "rounds", "kept of drafted", "speed-up", "tokens/s")
    table = table_of("draft", "nodes", "T", *statistics)
    for summary in summaries:
        overall = summary.overall
        table.add_row(
            *_run(summary),
            estimated(overall.tau),
            estimated(overall.mean),
            f"{overall.rounds:,}",
            f"{overall.kept:,} of {overall.drafted:,}",
            estimated(summary.speedup),
            f"{summary.tokens_per_second:,.0f} (plain {summary.plain_tokens_per_second:,.0f})",
        )
    print_table(table)
    depths = max(len(summary.overall.acceptance) for summary in summaries)
    table = table_of("draft", "nodes", "T", *(f"depth {depth}" for depth in range(1, depths + 1)))
    for summary in summaries:
        table.add_row(*_run(summary), *(f"{share:.2f}" for share in summary.overall.acceptance))
    print_table(table)
    print("depth: share of drafted tokens kept there, of rounds that kept the one above")
    print("AVG: columns weighted by their questions; a round's bonus token counts, the prompt's own token does not")
    print("intervals: 95 %, bootstrap over questions")
    print(f"speed-up: wall clock, compilation excluded, {evaluation.settings.batch} at a time on {evaluation.device};")
    print("  plain and speculative runs take turns, so a busy machine slows both, but single seconds are noisy")
    for temperature in evaluation.settings.temperatures:
        summary = next(summary for summary in summaries if summary.temperature == temperature)
        counts = [f"{count} by {why}" for why, count in sorted(summary.stops.items())]
        notes = [f"{summary.answers} answers, ended {', '.join(counts)}", f"{summary.empty} empty"]
        notes += [f"{count} questions cut short: {why}" for why, count in summary.ended.items()]
        print(f"temperature {temperature:g}: {'; '.join(notes)}")
    answers = sum(summary.answers for summary in summaries)
    same = answers - sum(len(summary.differing) for summary in summaries)
    print(f"{same:,} of {answers:,} answers are plain decoding's, token for token")


def _run(summary) -> tuple[str, str, str]:
    return summary.draft, str(summary.nodes), f"{summary.temperature:g}"
