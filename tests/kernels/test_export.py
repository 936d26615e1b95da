"""Every kernel lowers for a GPU and for a TPU: nothing in it runs on the CPU only, and every product asks for the
highest precision, without which TF32 and bfloat16 passes would make negative eigenvalues of Grams."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from layerwave import kernels
from layerwave.kernels.ridge import RidgeProblem


def shape(*dims, dtype=np.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


STATES, GRAMS, SETS = shape(6, 32, 64), shape(6, 32, 32), shape(5000, 3, dtype=np.int32)
VALID = shape(300, dtype=np.bool_)

PROBLEM = RidgeProblem(
    grams=shape(6, 60, 40),
    embedding=shape(60, 40),
    targets=shape(40, 16),
    head=shape(50, 16),
    offset=shape(50),
    inner=shape(10, 50),
    scored=shape(20, 50),
    top=shape(20, dtype=np.int32),
    samples=shape(20, dtype=np.int32),
    counts=shape(5),
)

KERNELS = {
    "gram": [(kernels.gram, STATES)],
    "eigenvalues": [(kernels.eigenvalues, GRAMS)],
    "matrix_entropy": [(partial(kernels.matrix_entropy, alpha=alpha), GRAMS) for alpha in (1, 1.1, 2, 3, math.inf)]
    + [(jax.grad(lambda K: kernels.matrix_entropy(K).sum()), GRAMS)],
    "set_entropy": [(kernels.set_entropy, GRAMS, SETS)],
    "gram_table": [(partial(kernels.gram_table, estimator=estimator), STATES) for estimator in ("biased", "debiased")],
    "cka": [(kernels.cka, STATES)],
    "conditional_cka": [(kernels.conditional_cka, STATES, SETS)],
    "conditional_cka_from_table": [(kernels.conditional_cka_from_table, shape(6, 6), SETS)],
    "transitions": [(kernels.transitions, shape(6, 6))],
    "token_entropy": [(kernels.token_entropy, shape(300, 64), shape(1000, 64))],
    "top_fraction": [(partial(kernels.top_fraction, rho=0.3), shape(300), VALID)],
    "sink_mask": [(kernels.sink_mask, shape(6, 300), VALID)],
    "block_matrix": [(partial(kernels.block_matrix, block=32), VALID)],
    "block_sums": [(kernels.block_sums, shape(32, 300), shape(6, 300, 64))],
    "centred_gram": [(kernels.centred_gram, STATES)],
    "gram_table_from_grams": [(kernels.gram_table_from_grams, GRAMS)],
    "set_spectra": [(kernels.set_spectra, GRAMS, SETS)],
    "coding_rate": [(partial(kernels.coding_rate, scale=2.0), shape(6, 32))],
    "effective_rank": [(kernels.effective_rank, shape(6, 32))],
    "shuffled_cka": [(kernels.shuffled_cka, GRAMS, shape(20, 6, 32, dtype=np.int32))],
    "set_log_det": [(kernels.set_log_det, shape(6, 6), SETS)],
    "token_grams": [(partial(kernels.token_grams, fitting=40), shape(6, 60, 64))],
    "set_acceptance": [(partial(kernels.set_acceptance, batch=batch), PROBLEM, shape(6), SETS) for batch in (1, 8)],
    "relevance_redundancy": [(partial(kernels.relevance_redundancy, penalty=1.0), shape(6, 6), SETS, shape(6))],
}


def test_every_kernel_is_here():
    assert sorted(KERNELS) == kernels.__all__


@pytest.mark.parametrize("name", kernels.__all__)
def test_export(name):
    for kernel, *arguments in KERNELS[name]:
        exported = jax.export.export(jax.jit(lambda *args, kernel=kernel: kernel(*args)), platforms=["cuda", "tpu"])(
            *arguments
        )
        assert exported.platforms == ("cuda", "tpu")
        assert "callback" not in exported.mlir_module()
        products = [line for line in exported.mlir_module().splitlines() if "stablehlo.dot_general" in line]
        assert not [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line]
