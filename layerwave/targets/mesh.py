"""A `(data, model)` mesh of devices, and how parameters and states lie on it.

`data` shares out the sequences of a batch, `model` the heads, hidden units and vocabulary of one copy of the
parameters. A mesh spans the devices of one process; several processes share out the conversations.
"""

import re
from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from layerwave.errors import LayerwaveError

AXES = DATA, MODEL = ("data", "model")


def make_mesh(shape: str | None = None) -> Mesh | None:
    """The mesh of a text such as `data=4,model=2`; an axis that is not named is 1.

    By default all devices of this process on `data`. None where there is one device and nothing is asked for: then
    nothing is sharded.

    Raises:
      LayerwaveError: not of that form, or more devices than this process has.
    """
    devices = jax.local_devices()
    if shape is None:
        sizes = {DATA: len(devices), MODEL: 1}
    else:
        parts = [re.fullmatch(r"(data|model)=([1-9]\d*)", part) for part in shape.replace(" ", "").split(",")]
        if None in parts or len({part[1] for part in parts}) < len(parts):
            raise LayerwaveError(f"mesh is {shape!r}, but must be of the form data=4,model=2: correct --mesh")
        sizes = dict.fromkeys(AXES, 1) | {part[1]: int(part[2]) for part in parts}
    number = sizes[DATA] * sizes[MODEL]
    if number > len(devices):
        raise LayerwaveError(
            f"mesh data={sizes[DATA]},model={sizes[MODEL]} needs {number} devices, but this process has "
            f"{len(devices)} ({devices[0].platform}), and a mesh lies within one process: pass a smaller --mesh, or "
            "use a machine with more devices (several processes share out conversations, not a model)"
        )
    if number == 1:
        return None
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[:number])


def shares(mesh: Mesh | None) -> int:
    """Into how many equal parts the sequences of a batch are cut."""
    return 1 if mesh is None else mesh.shape[DATA]


def on_mesh(mesh: Mesh, *spec: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def spread(x: Shaped[Array, "*axes D"]) -> Shaped[Array, "*axes D"]:
    """Shares out the features among the devices of `model`, inside a step that runs on a mesh; else nothing.

    Features that the axis does not divide stay whole on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[MODEL] == 1 or x.shape[-1] % mesh.shape[MODEL]:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 1), MODEL))


def each_device(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Lets every device of `model` compute the same, inside a step that runs on a mesh; else the function itself.

    A host callback, which is what LAPACK is, does not run where the compiler shards by itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    whole = PartitionSpec()
    return jax.shard_map(function, in_specs=whole, out_specs=whole, axis_names={MODEL}, check_vma=False)
