"""Mixture of experts: each token goes through the few experts that a router chooses for it.

No expert has a capacity, so nothing is dropped and a token's state does not depend on its batch mates: tokens are
sorted by expert, and `jax.lax.ragged_dot` multiplies each expert's rows by its own matrix.

Letters: `n` tokens, `k` experts of a token, `E` experts, `D` features, `I` features inside an expert.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from layerwave.targets.config import DecoderConfig

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class ExpertLinear(nnx.Module):
    """One matrix for each expert."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: DTypeLike, rngs: nnx.Rngs):
        normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=(0,))
        self.kernel = nnx.Param(normal(rngs.params(), (experts, inputs, outputs), dtype))

    def __call__(self, rows: Float[Array, "rows inputs"], sizes: Int[Array, " E"]) -> Float[Array, "rows outputs"]:
        """The first `sizes[0]` rows are the first expert's, and so on."""
        return jax.lax.ragged_dot(rows, self.kernel[...], sizes)


class ExpertMLP(nnx.Module):
    """The experts' gated linear units."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(ExpertLinear, config.experts.count, dtype=dtype, rngs=rngs)
        self.gate_proj = linear(config.hidden_size, config.experts.size)
        self.up_proj = linear(config.hidden_size, config.experts.size)
        self.down_proj = linear(config.experts.size, config.hidden_size)
        self.activation = config.activation

    def __call__(self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"]) -> Float[Array, "rows D"]:
        gate = ACTIVATIONS[self.activation](self.gate_proj(rows, sizes))
        return self.down_proj(gate * self.up_proj(rows, sizes), sizes)


class MixtureOfExperts(nnx.Module):
    """Sum of the outputs of the `k` most probable experts, weighted by their probabilities (float32)."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.settings = config.experts
        self.gate = nnx.Linear(config.hidden_size, config.experts.count, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.experts = ExpertMLP(config, dtype, rngs)

    def __call__(self, x_btd: Float[Array, "b T D"]) -> Float[Array, "b T D"]:
        x_nd, k = x_btd.reshape(-1, x_btd.shape[-1]), self.settings.per_token
        # The softmax is over all experts; normalizing the chosen ones makes it one over these.
        probabilities = jax.nn.softmax(self.gate(x_nd).astype(jnp.float32), axis=-1)
        weights_nk, experts_nk = jax.lax.top_k(probabilities, k)
        if self.settings.normalized:
            weights_nk = weights_nk / jnp.sum(weights_nk, axis=-1, keepdims=True)

        order = jnp.argsort(experts_nk.reshape(-1), stable=True)
        sizes = jnp.bincount(experts_nk.reshape(-1), length=self.settings.count).astype(jnp.int32)
        rows = self.experts(x_nd[order // k], sizes)
        # Back in the tokens' own order, so that a token's sum does not depend on how the others were sorted.
        rows_nkd = jnp.zeros_like(rows).at[order].set(rows).reshape(len(x_nd), k, -1)
        mixed = jnp.einsum("nk,nkd->nd", weights_nk, rows_nkd.astype(jnp.float32))
        return mixed.astype(x_btd.dtype).reshape(x_btd.shape)
