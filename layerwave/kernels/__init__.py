"""Pure array functions of the method: Grams, entropies, CKA, token filter, blocks, the best linear draft.

They know no model and no file, and run under `jit` and `vmap` on CPU, GPU and TPU. `precision.py` says in which float
type they compute.
"""

from layerwave.kernels.blocks import block_matrix, block_sums
from layerwave.kernels.cka import (
    centred_gram,
    cka,
    conditional_cka,
    conditional_cka_from_table,
    gram_table,
    gram_table_from_grams,
    shuffled_cka,
    transitions,
)
from layerwave.kernels.criteria import coding_rate, effective_rank, relevance_redundancy, set_log_det, set_spectra
from layerwave.kernels.entropy import matrix_entropy, set_entropy
from layerwave.kernels.filter import sink_mask, token_entropy, top_fraction
from layerwave.kernels.gram import gram
from layerwave.kernels.lapack import eigenvalues
from layerwave.kernels.ridge import set_acceptance, token_grams

__all__ = [
    "block_matrix",
    "block_sums",
    "centred_gram",
    "cka",
    "coding_rate",
    "conditional_cka",
    "conditional_cka_from_table",
    "effective_rank",
    "eigenvalues",
    "gram",
    "gram_table",
    "gram_table_from_grams",
    "matrix_entropy",
    "relevance_redundancy",
    "set_acceptance",
    "set_entropy",
    "set_log_det",
    "set_spectra",
    "shuffled_cka",
    "sink_mask",
    "token_entropy",
    "token_grams",
    "top_fraction",
    "transitions",
]
