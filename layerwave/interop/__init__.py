"""How other tools name, store and read what layerwave makes."""

from layerwave.interop.check import ExportCheck, check_export
from layerwave.interop.export import ENGINES, Engine, Exported, export_draft
from layerwave.interop.hidden_states import (
    HiddenStates,
    check_final_state,
    read_specforge,
    read_speculators,
    write_speculators,
)
from layerwave.interop.importing import import_draft
from layerwave.interop.layer_ids import (
    CONSUMERS,
    Consumer,
    Convention,
    LayerIds,
    layer_ids,
    layer_ids_table,
    layers_from_ids,
)
from layerwave.interop.state_files import StateFiles

__all__ = [
    "CONSUMERS",
    "ENGINES",
    "Consumer",
    "Convention",
    "Engine",
    "ExportCheck",
    "Exported",
    "HiddenStates",
    "LayerIds",
    "StateFiles",
    "check_export",
    "check_final_state",
    "export_draft",
    "import_draft",
    "layer_ids",
    "layer_ids_table",
    "layers_from_ids",
    "read_specforge",
    "read_speculators",
    "write_speculators",
]
