"""Measure which layers of a target model a speculative-decoding draft should read.

    import layerwave as lw

    target = lw.load_target("mini")
    cal = lw.calibrate(target, "conversations.jsonl")
    print(lw.elsi(cal, size=3))

Layers are numbered from 0 by their output; boundary `b = l + 1` counts the embedding as 0. Entropies are in nats.
"""

from importlib import import_module

from layerwave.errors import LayerwaveError

# Rooms load when one of their names is first used: importing flax and transformers takes seconds that a user of the
# kernels should not wait for.
_ROOMS = {
    "kernels": (
        "block_matrix block_sums cka conditional_cka eigenvalues gram gram_table matrix_entropy set_entropy sink_mask "
        "token_entropy top_fraction transitions"
    ),
    "targets": "Decoder DecoderConfig Target load_target make_mesh",
    "calibration": "Calibration CalibrationSettings GivenStates calibrate calibrate_states read_conversations",
    "selection": (
        "AcceptanceScores Selection SelectionSettings acceptance_study baseline baselines beam_overlap cka_floor "
        "decompose diagnose elsi elsi_c exhaustive find_transitions learning_curve marginal_gains predicted_acceptance "
        "random_sets rank_among_all select sensitivity sink_dominance stability"
    ),
    "drafts": "Draft DraftConfig DraftVocabulary Eagle3 initial_draft load_draft save_draft",
    "decoding": "Evaluation EvaluationSettings GenerationSettings TreeSettings decode distill evaluate generate",
    "validation": "Validation ValidationSettings validate",
    "interop": "StateFiles export_draft import_draft layer_ids layer_ids_table",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = ["LayerwaveError", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'layerwave' has no attribute {name!r}")
    return getattr(import_module(f"layerwave.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
