"""`layerwave train`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg

from layerwave.commands.printing import Json, join, parse_layers, print_json, print_table, progress_bar, table_of
from layerwave.drafts.settings import TrainSettings
from layerwave.targets import DTypeName


@dataclass(frozen=True)
class Train:
    """Train an EAGLE-3 draft for every layer set, all of them on one pass of the target over the data."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    conversations: Annotated[Positional[Path], arg(metavar="CONVERSATIONS")]
    """ShareGPT JSON or JSONL, OpenAI-style messages, or lines of {"text": ...}; best what the target itself answered
    (layerwave distill)."""
    layers: UseAppendAction[tuple[str, ...]]
    """Layer outputs counted from 0, as in --layers 5,23,35; once for each draft."""
    out: Path
    """Folder of the run: metrics.jsonl, checkpoints, and drafts/5-23-35. Run the same command again to resume."""
    settings: FlagCreatePairsOff[OmitArgPrefixes[TrainSettings]] = TrainSettings()
    target_dtype: DTypeName = "float32"
    """Of the target's parameters and activations."""
    mesh: str | None = None
    """Devices, as in data=4,model=2: shares of a batch, and devices that share the target's parameters. By default all
    on data."""
    states: Path | None = None
    """Folder to store the target's states in once, instead of running the target in every epoch."""
    max_disk_gb: float = 50.0
    """Most gigabytes that the stored states may take."""
    tensorboard: FlagCreatePairsOff[bool] = False
    """Write OUT/tensorboard as well; needs the extra layerwave[tensorboard]."""
    evaluation: Path | None = None
    """Questions kept for evaluation: conversations that share 13 words in a row with one are left out."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import read_conversations
        from layerwave.drafts import decontaminate
        from layerwave.drafts.examples import examples
        from layerwave.drafts.metrics import read_metrics
        from layerwave.drafts.trainer import train
        from layerwave.targets import load_target, make_mesh

        layer_sets = [parse_layers(text) for text in self.layers]
        conversations = read_conversations(self.conversations)
        if self.evaluation:
            conversations, hits = decontaminate(conversations, self.evaluation)
            for hit in hits:
                print(f"left out: {hit.where} shares with {hit.evaluation}: {hit.words}", file=sys.stderr)
        target = load_target(self.target, self.target_dtype, make_mesh(self.mesh))
        length = min(self.settings.max_length, target.config.max_positions)
        data = examples(target.tokenizer, target.config.vocab_size, conversations, length)
        with progress_bar(f"training {len(layer_sets)} drafts of {self.target}") as progress:
            train(
                target,
                data,
                layer_sets,
                self.settings,
                self.out,
                states=self.states,
                max_disk_gb=self.max_disk_gb,
                tensorboard=self.tensorboard,
                progress=progress.steps,
                announce=lambda text: print(text, file=sys.stderr, flush=True),
            )
        lines, asked = read_metrics(self.out), [sorted(layers) for layers in layer_sets]
        last = [line for line in lines if line["step"] == lines[-1]["step"] and line["split"] == lines[-1]["split"]]
        last.sort(key=lambda line: asked.index(line["layers"]))
        if self.json:
            print_json({"out": str(self.out), "tallies": data.tallies, "drafts": last})
            return
        print("; ".join(f"{count:,} {what}" for what, count in data.tallies.items() if count))
        table = table_of("layers", "first-step accuracy", "first-step acceptance", "τ greedy", "τ sampled")
        for line in last:
            numbers = (line["accuracy"][0], line["acceptance"][0], line["tau_greedy"], line["tau_sampled"])
            table.add_row(join(line["layers"]), *(f"{number:.3f}" for number in numbers))
        print_table(table)
        print(f"on the {last[0]['split'].replace('_', '-')} examples, teacher-forced, after step {last[0]['step']}")
        print(f"wrote {self.out}/metrics.jsonl and {self.out}/drafts")
