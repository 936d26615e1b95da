"""Trains drafts of several layer sets for the mini target, beside a bigram baseline; draws their loss curves.

  layerwave distill mini PROMPTS --out ANSWERS --max-new-tokens 200 --batch 100
  python benchmarks/train_mini_drafts.py --out RUN --conversations ANSWERS [--layers 2,6,9 ...] [--steps 300]
      [--fc-norm] [--store]

Writes benchmarks/results/NAME.png and NAME.json. With --fc-norm the drafts norm each layer by itself before fc
(EAGLE-3.1): on this target raw states need four times the steps for the same accuracy. The baseline predicts the token
that followed the current one most often in the training examples, among those of the draft vocabulary; its accuracy is
counted like the drafts': over the same held-out positions, against the target's most probable token.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from layerwave.drafts import DraftVocabulary, supervise
from layerwave.drafts.config import draft_name
from layerwave.drafts.examples import FIRST_PREDICTED, Examples, examples
from layerwave.drafts.loader import Rows, split
from layerwave.drafts.metrics import read_metrics
from layerwave.drafts.settings import TrainSettings
from layerwave.drafts.stacks import observe
from layerwave.drafts.trainer import train
from layerwave.progress import Progress
from layerwave.targets import Target, load_target

RESULTS = Path(__file__).parent / "results"
LAYER_SETS = ["10", "2,6,9", "5,8,11"]


def bigram(training: Examples, vocabulary: DraftVocabulary) -> np.ndarray:
    """For each token the draft token that most often follows it; after an unknown one the most frequent of all."""
    size = training.vocab_size
    counts = np.zeros((size, size), np.int32)
    for row in training:
        np.add.at(counts, (row.tokens[:-1], row.tokens[1:]), 1)
    counts = np.where(vocabulary.t2d[None], counts, -1)
    most_frequent = counts.sum(axis=0).argmax()
    return np.where(counts.max(axis=1) > 0, counts.argmax(axis=1), most_frequent)


def baseline_accuracy(
    target: Target, held_out: Examples, table: np.ndarray, vocabulary: DraftVocabulary
) -> dict[str, float]:
    """Accuracy of the table against the target's best token, and against the text, where the mask asks."""
    graphdef, params = nnx.split(target.decoder)
    rows = Rows.lay(held_out, 512, packed=False)
    right_of_target = right_of_text = asked = 0
    for chosen in rows.in_order(1):
        batch = rows.batch(chosen)
        normed = observe(graphdef, params, batch, jnp.array([0])).normed
        best = np.asarray(supervise(normed, target.decoder.head_weight(), jnp.asarray(vocabulary.tokens)).best)
        mask = batch.loss_mask[:, FIRST_PREDICTED:]
        guess = table[batch.tokens[:, 1:-1]]
        right_of_target += (guess == best[:, 1:-1])[mask].sum()
        right_of_text += (guess == batch.tokens[:, FIRST_PREDICTED:])[mask].sum()
        asked += mask.sum()
    return {"of_target": right_of_target / asked, "of_text": right_of_text / asked, "predicted": int(asked)}


def draw(lines: list[dict], layer_sets: list[tuple[int, ...]], baseline: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for layers in layer_sets:
        own = [line for line in lines if tuple(line["layers"]) == layers]
        name = ", ".join(map(str, layers))
        loss = np.array([line["losses"][0] for line in own if line["split"] == "train"])
        smooth = np.convolve(loss, np.ones(10) / 10, mode="valid")
        left.plot(np.arange(len(smooth)) + 10, smooth, label=f"layers {name}", linewidth=1.2)
        held = [line for line in own if line["split"] == "held_out"]
        right.plot([line["step"] for line in held], [line["accuracy"][0] for line in held], "o-", markersize=3)
    left.set(xlabel="step", ylabel="first-step cross-entropy (nats), mean of 10", title="training")
    right.axhline(baseline, color="0.4", linestyle="--")
    right.text(right.get_xlim()[1], baseline, "bigram ", ha="right", va="bottom", color="0.4")
    right.set(xlabel="step", ylabel="first-step accuracy", title="held out", ylim=(0, None))
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", default=LAYER_SETS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ttt-steps", type=int, default=2)
    parser.add_argument("--fc-norm", action="store_true", help="norm each layer's states before fc")
    parser.add_argument("--store", action="store_true", help="run the target once and keep its states in RUN/states")
    parser.add_argument("--name", default="mini_drafts", help="of the results")
    args = parser.parse_args()
    layer_sets = [tuple(map(int, text.split(","))) for text in args.layers]

    target = load_target("mini")
    settings = TrainSettings(
        steps=args.steps,
        batch_size=4,
        max_length=512,
        ttt_steps=args.ttt_steps,
        learning_rate=5e-3,
        draft_vocab_size=1024,
        fc_norm=args.fc_norm,
        held_out=0.03,
        evaluate_every=max(1, args.steps // 6),
        checkpoint_every=max(1, args.steps // 6),
    )
    data = examples(target.tokenizer, target.config.vocab_size, str(args.conversations), settings.max_length)
    training, held_out = split(data, settings.held_out)
    started = time.monotonic()
    with Progress("training the drafts of mini") as progress:
        states = args.out / "states" if args.store else None
        drafts = train(
            target, data, layer_sets, settings, args.out / "run", states=states, progress=progress.steps, announce=print
        )
    seconds = time.monotonic() - started
    vocabulary = drafts[0].vocabulary
    baseline = baseline_accuracy(target, held_out, bigram(training, vocabulary), vocabulary)

    lines = read_metrics(args.out / "run")
    last = [line for line in lines if line["split"] == "held_out" and line["step"] == args.steps]
    result = {
        "conversations": len(data),
        "training tokens": sum(len(row.tokens) for row in training),
        "predicted": sum(int(row.loss_mask[FIRST_PREDICTED:].sum()) for row in training),
        "steps": args.steps,
        "seconds": round(seconds),
        "processor seconds": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime),
        "bigram": baseline,
        "drafts": {
            draft_name(line["layers"]): {
                key: line[key] for key in ("losses", "accuracy", "acceptance", "tau_greedy", "tau_sampled", "predicted")
            }
            | {"accuracy / bigram": round(line["accuracy"][0] / baseline["of_target"], 2)}
            for line in last
        },
    }
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(lines, layer_sets, baseline["of_target"], RESULTS / f"{args.name}.png")


if __name__ == "__main__":
    main()
