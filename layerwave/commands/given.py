"""`layerwave calibrate --states`: what another program stored, in place of target and conversations."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerwave.commands.printing import progress_bar
from layerwave.errors import LayerwaveError


@dataclass(frozen=True)
class GivenFiles:
    """In place of TARGET and CONVERSATIONS: states that another program stored. No target is loaded."""

    states: tuple[Path, ...] = ()
    """Files or folders: hs_*.safetensors of speculators (vLLM), or plain arrays in .npy or .safetensors."""
    num_layers: int | None = None
    """Of the target whose states they are."""
    ids: str | None = None
    """For hs_*.safetensors: the layer ids that launch_vllm was given, as in 1-35 or 1,2,3; all layers are needed."""
    numbering: Literal["output", "boundary"] | None = None
    """For plain arrays: slices are the outputs of the layers, or hidden_states with the embedding first."""
    stored_final_state: Literal["pre_norm", "post_norm"] | None = None
    """For plain arrays: the last slice was taken before or after the final norm (Hugging Face: after)."""
    name: str = "given states"
    """Recorded as the target's name."""

    def calibrate(self, settings):
        from layerwave.calibration import calibrate_states
        from layerwave.interop import StateFiles

        if self.num_layers is None:
            raise LayerwaveError("states cannot say whether they are of all layers: give the target's --num-layers")
        samples = StateFiles(
            self.states,
            self.num_layers,
            ids=None if self.ids is None else parse_ids(self.ids),
            numbering=self.numbering,
            final_state=self.stored_final_state,
        )
        with progress_bar(f"calibrating {len(samples)} files of states") as progress:
            calibration = calibrate_states(samples, settings, name=self.name, progress=progress)
        print(
            "no token sample, so no predicted acceptance: it needs the target's head and embedding; "
            f"last state: {calibration.settings.final_state}",
            file=sys.stderr,
        )
        return calibration


def parse_ids(text: str) -> list[int]:
    """Whole numbers between commas, and ranges of them that end with their last: 1-35."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]
    except ValueError:
        raise LayerwaveError(
            f"ids {text!r} are no whole numbers between commas or ranges; write for example 1-35"
        ) from None
