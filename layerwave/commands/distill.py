"""`layerwave distill`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from layerwave.commands.printing import Json, check_out, print_json, progress_bar
from layerwave.decoding.distill import DistillSettings, distill, listed
from layerwave.targets import DTypeName


@dataclass(frozen=True)
class Distill:
    """Let a target answer the questions of a file, for a draft to learn from. An interrupted run goes on."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    prompts: Annotated[Positional[Path], arg(metavar="PROMPTS")]
    """Conversations, whose answers are replaced, or lines of {"prompt": ...} or {"turns": [...]}."""
    out: Path
    """The JSON lines file to write."""
    settings: OmitArgPrefixes[DistillSettings] = DistillSettings()
    dtype: DTypeName = "float32"
    """Parameters and activations; norms and softmax are float32 in any case."""
    evaluation: Path | None = None
    """Questions kept for evaluation: prompts that share 13 words in a row with one are left out."""
    json: Json = False

    def run(self) -> None:
        from layerwave.targets import load_target

        check_out(self.out, self.prompts, *([self.evaluation] if self.evaluation else []))
        target = load_target(self.target, self.dtype)
        with progress_bar(f"distilling {self.target}") as progress:
            made = distill(target, self.prompts, self.out, self.settings, evaluation=self.evaluation, progress=progress)
        if self.json:
            print_json({"out": str(self.out), **dataclasses.asdict(made)})
            return
        for hit in made.contaminated:
            print(f"left out: {hit.where} shares with {hit.evaluation}: {hit.words}", file=sys.stderr)
        print(listed(made.tallies))
        print(f"wrote {self.out}")
