"""The step of step.py on a mesh: every share of `data` reduces its own sequences, and sums meet only at the end.

G shares. Within a share the compiler lays the work out over the devices of `model`, by where the parameters lie.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int32

from layerwave.calibration.settings import POOLS
from layerwave.calibration.step import BatchResult, DrawnStates, Sums, batch_step
from layerwave.targets.mesh import DATA, MODEL, on_mesh, shares


def empty_sums(mesh: Mesh | None, num_layers: int, accumulators: int, block: int, features: int) -> Sums:
    """Zeros; on a mesh each share has its own, with the features shared out over `model` where they divide."""
    if mesh is None:
        return Sums.zeros(num_layers, accumulators, block, features)
    shapes = [(num_layers, number, block, features) for number in (len(POOLS), accumulators)]
    place = on_mesh(mesh, DATA, None, None, None, None if features % mesh.shape[MODEL] else MODEL)
    return Sums(*(jnp.zeros((shares(mesh), *shape), device=place) for shape in shapes))


@jax.jit
def total(sums: Sums) -> Sums:
    """The sums of all shares together."""
    return Sums(*(jnp.sum(x, axis=0) for x in sums))


def sharded_step(
    mesh: Mesh,
    graphdef: Any,
    params: Any,
    sums: Any,
    tokens: Any,
    lengths: Any,
    weights: Any,
    *rest: Any,
    **static: Any,
) -> tuple[Any, BatchResult, DrawnStates]:
    """`batch_step` with sums that have G as their first axis, for a number of sequences that G divides."""
    tokens, lengths = jax.device_put((tokens, lengths), on_mesh(mesh, DATA))
    weights = jax.device_put(weights, on_mesh(mesh, None, DATA))
    return _sharded_step(mesh, graphdef, params, sums, tokens, lengths, weights, *rest, **static)


@partial(
    jax.jit,
    static_argnames=("mesh", "graphdef", "rho", "post_norm", "sink_multiple", "dtype"),
    donate_argnames="sums",
)
def _sharded_step(
    mesh: Mesh,
    graphdef: Any,
    params: Any,
    sums: Any,
    tokens: Int32[Array, "b T"],
    lengths: Int32[Array, " b"],
    weights: Float32[Array, "C b"],
    chosen: Int32[Array, ""] | int,
    where: Int32[Array, "2 K"],
    projection: Float32[Array, "D W"] | None,
    **static: Any,
) -> tuple[Any, BatchResult, DrawnStates]:
    def share(params, sums, tokens, lengths, weights, rows, chosen, where, projection):
        row = where[0] - rows[0]
        mine = (row >= 0) & (row < len(rows))
        own = jnp.stack([jnp.where(mine, row, 0), where[1]])
        own_sums = jax.tree.map(lambda x: x[0], sums)
        sums, result, drawn = batch_step(
            graphdef, params, own_sums, tokens, lengths, weights, chosen, own, projection, **static
        )
        drawn = DrawnStates(
            jnp.where(mine[None, :, None], drawn.states, 0),
            jnp.where(mine[:, None], drawn.normed, 0),
            jnp.where(mine, drawn.entropy, 0),
            mine & drawn.sinks,
        )
        sums, drawn, largest, finite = jax.tree.map(lambda x: x[None], (sums, drawn, result.largest, result.finite))
        return sums, result._replace(largest=largest, finite=finite), drawn

    whole, rows, columns = PartitionSpec(), PartitionSpec(DATA), PartitionSpec(None, DATA)
    sums, result, drawn = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(whole, rows, rows, rows, columns, rows, whole, whole, whole),
        out_specs=(rows, BatchResult(columns, columns, rows, rows, rows, rows), rows),
        axis_names={DATA},
        check_vma=False,
    )(params, sums, tokens, lengths, weights, jnp.arange(len(tokens), dtype=jnp.int32), chosen, where, projection)
    largest = jnp.where(jnp.any(jnp.isnan(result.largest), axis=0), jnp.nan, jnp.max(result.largest, axis=0))
    # All shares but the owner have zeros at a drawn position, so a float32 sum keeps every bit.
    drawn = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=jnp.float32).astype(x.dtype), drawn)
    return sums, result._replace(largest=largest, finite=jnp.all(result.finite)), drawn
