"""`layerwave export`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from layerwave.commands.printing import Json, print_json
from layerwave.targets import DTypeName


@dataclass(frozen=True)
class Export:
    """Write a draft for an inference engine: its format, and the layer ids as it reads them."""

    draft: Annotated[Positional[Path], arg(metavar="DRAFT")]
    """Directory of a draft that layerwave trained."""
    consumer: Literal["sglang", "sglang-deepseek", "sglang-gpt-oss", "specforge", "speculators", "vllm"]
    """Who shall load it; SGLang reads ids in one of three ways, by the class of the target."""
    out: Path
    """The directory to write; new or empty."""
    target: str | None = None
    """Directory in Hugging Face format, hub id, or mini; by default the one that the draft was trained for."""
    dtype: DTypeName = "bfloat16"
    """Of the tensors."""
    check: FlagCreatePairsOff[bool] = False
    """Read back what was written and compare logits."""
    json: Json = False

    def run(self) -> None:
        from layerwave.drafts import load_draft
        from layerwave.interop import check_export, export_draft
        from layerwave.targets import load_target

        draft = load_draft(self.draft)
        target = load_target(self.target or draft.target_name)
        exported = export_draft(draft, target, self.consumer, self.out, dtype=self.dtype)
        check = check_export(draft, target, exported) if self.check else None
        if self.json:
            found = dataclasses.asdict(exported) | {"directory": str(exported.directory)}
            print_json(found | {"check": check and dataclasses.asdict(check)})
            return
        print(f"wrote {exported.directory} in the format of {exported.format}, {exported.dtype}")
        print(exported.ids_line)
        for since in exported.since:
            print(f"needs {since} or later")
        if check is not None:
            print(
                f"read back: logits within {check.difference:.1e} of the largest; "
                f"rounding to {exported.dtype} moves them by {check.rounding:.1e}"
            )
