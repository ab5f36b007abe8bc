"""The arguments of a function of other code: on which mesh they lie, and their values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

_DRAWN = ' (only floating-point numbers are drawn at random)'
AnyMesh = Mesh | AbstractMesh


def simulated_mesh(args: tuple[Any, ...], mesh: AnyMesh | None) -> Mesh | None:
    """The mesh given, that of the arguments, or jax.set_mesh's, on CPU devices if it is abstract.

    None where there is none. Raises ValueError where two of them differ, or jax has too few
    devices.
    """
    found = [one.sharding.mesh for one in jax.tree.leaves(args) if _is_on_a_mesh(one)]
    if mesh is not None:
        found.append(mesh)
    shapes = list({tuple(one.shape.items()): None for one in found})
    if len(shapes) > 1:
        raise ValueError(
            f'several meshes, of {" and ".join(str(dict(one)) for one in shapes)}: place all '
            'arguments on the same, and leave out mesh= or pass that one'
        )
    if not found:
        context = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
        found = [one for one in context if not one.empty]
    concrete = [one for one in (mesh, *found) if isinstance(one, Mesh)]
    if concrete or not found:
        return concrete[0] if concrete else None
    devices = cpu_devices(found[0].size)
    shape, types = found[0].shape, found[0].axis_types
    return Mesh(np.array(devices).reshape([*shape.values()]), tuple(shape), axis_types=types)


def cpu_devices(count: int) -> list[jax.Device]:
    """As many simulated devices. Raises ValueError with the fix where jax has fewer."""
    devices = jax.devices('cpu')
    if len(devices) < count:
        raise ValueError(
            f'the program is for {count} devices, and jax has {len(devices)} CPU devices: call '
            f"jax.config.update('jax_num_cpu_devices', {count}) before jax is first used"
        )
    return devices[:count]


def have_devices(args: tuple[Any, ...]) -> bool:
    """Whether some argument lies on a mesh of devices."""
    on_meshes = filter(_is_on_a_mesh, jax.tree.leaves(args))
    return any(isinstance(leaf.sharding.mesh, Mesh) for leaf in on_meshes)


def on_devices(args: tuple[Any, ...], mesh: Mesh | None) -> tuple[Any, ...]:
    """The arguments, those that are abstract on an abstract mesh on `mesh` instead."""

    def placed(leaf: Any) -> Any:
        if not (_is_on_a_mesh(leaf) and isinstance(leaf.sharding.mesh, AbstractMesh)):
            return leaf
        assert mesh is not None
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, args)


def values(args: tuple[Any, ...], dtypes: list[Any], seed: int) -> list[np.ndarray]:
    """The arguments' leaves as arrays of the program: abstract ones random, keys as integers.

    Raises ValueError for an abstract argument of integers: random ones would mean nothing.
    """
    random, leaves = np.random.default_rng(seed), jax.tree_util.tree_leaves_with_path(args)
    if len(leaves) != len(dtypes):
        raise ValueError(
            f'{len(leaves)} arrays among the arguments, and the function reads {len(dtypes)}: bind '
            'its static arguments first, jax.jit(functools.partial(function, static))'
        )
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return [_value(*one, dtype, random) for one, dtype in zip(named, dtypes, strict=True)]


def _value(name: str, leaf: Any, dtype: Any, random: np.random.Generator) -> np.ndarray:
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return np.array(jax.random.key_data(leaf)) if is_key else np.array(leaf, dtype)
    if is_key or not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f'the argument{name} is abstract and of {dtype}: pass an array{_DRAWN}')
    # Rows of length 1: products of long rows would saturate what follows, and magnify rounding.
    scale = (leaf.shape[-1] or 1) ** -0.5 if leaf.shape else 1
    drawn = scale * random.normal(size=leaf.shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * scale * random.normal(size=leaf.shape)
    return np.asarray(drawn, dtype)


def _is_on_a_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, 'sharding', None), NamedSharding)
