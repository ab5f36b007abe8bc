"""The arguments of a user's function: the mesh that they are on, and their values."""

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced

_DRAWN = ' (only floating-point numbers are drawn at random)'
_STAGES = Traced, Lowered, Compiled
AnyMesh = Mesh | AbstractMesh


def simulated_mesh(args: tuple[Any, ...], mesh: AnyMesh | None) -> Mesh | None:
    """Return `mesh`, or the mesh of the arguments or of jax.set_mesh; None if there is none.

    An abstract mesh is replaced by a mesh of CPU devices. Raises ValueError if two of the meshes
    differ, or if jax has too few devices.
    """
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(args) if _is_on_a_mesh(leaf)]
    if mesh is not None:
        meshes.append(mesh)
    one_shape(meshes)
    if not meshes:
        context = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
        meshes = [each for each in context if not each.empty]
    concrete = [each for each in (mesh, *meshes) if isinstance(each, Mesh)]
    if concrete or not meshes:
        return concrete[0] if concrete else None
    devices = cpu_devices(meshes[0].size)
    shape, types = meshes[0].shape, meshes[0].axis_types
    return Mesh(np.array(devices).reshape([*shape.values()]), tuple(shape), axis_types=types)


def one_shape(meshes: Sequence[AnyMesh]) -> dict[str, int] | None:
    """Return the axis sizes of the meshes, None for no mesh. Raises ValueError if two differ."""
    shapes = list({tuple(each.shape.items()): None for each in meshes})
    if len(shapes) > 1:
        raise ValueError(
            f'several meshes, {" and ".join(str(dict(shape)) for shape in shapes)}: place all '
            'arguments on the same mesh, and leave out mesh= or pass that mesh'
        )
    return dict(shapes[0]) if shapes else None


def cpu_devices(count: int) -> list[jax.Device]:
    """Return the first `count` CPU devices. Raises ValueError, with the fix, if there are fewer."""
    devices = jax.devices('cpu')
    if len(devices) < count:
        raise ValueError(
            f'the program needs {count} devices, but jax has {len(devices)} CPU devices: call '
            f"jax.config.update('jax_num_cpu_devices', {count}) before jax is first used"
        )
    return devices[:count]


def context(args: tuple[Any, ...], mesh: AnyMesh | None) -> AbstractContextManager[Any]:
    """Return a context in which a function of these arguments is traced.

    It sets `simulated_mesh(args, mesh)`, unless the arguments alone are on a mesh of real devices:
    then the caller can set it.
    """
    on_meshes = filter(_is_on_a_mesh, jax.tree.leaves(args))
    have_devices = any(isinstance(leaf.sharding.mesh, Mesh) for leaf in on_meshes)
    devices_mesh = simulated_mesh(args, mesh)
    is_needed = devices_mesh is not None and (mesh is not None or not have_devices)
    return jax.set_mesh(devices_mesh) if is_needed else nullcontext()


def of_jax(stage: Any) -> Any:
    """Return jax's own Traced, Lowered or Compiled, which Flax and Equinox wrap.

    Anything else is returned as it is.
    """
    wrapped = (getattr(stage, name, None) for name in ('traced', 'lowered', 'compiled'))
    return next((each for each in wrapped if isinstance(each, _STAGES)), stage)


def on_devices(args: tuple[Any, ...], mesh: Mesh | None) -> tuple[Any, ...]:
    """Return the arguments, with abstract arrays moved from an abstract mesh to `mesh`."""

    def placed(leaf: Any) -> Any:
        if not (_is_on_a_mesh(leaf) and isinstance(leaf.sharding.mesh, AbstractMesh)):
            return leaf
        assert mesh is not None
        memory = leaf.sharding.memory_kind
        sharding = NamedSharding(mesh, leaf.sharding.spec, memory_kind=memory)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, args)


def is_of_equinox(function: Any) -> bool:
    """Return whether a function is an Equinox module, or a method of one: it can own arrays."""
    kinds = type(getattr(function, '__self__', function)).__mro__
    return callable(function) and any(kind.__module__.split('.')[0] == 'equinox' for kind in kinds)


def of_arrays(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    reference: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a jitted function of the arrays in `args` and in `function`, and these arrays.

    Other leaves are constants, such as the activation functions of an Equinox module. It returns
    the arrays in the results of `function`, or of `reference` if it is given.
    """
    if isinstance(function, types.MethodType):
        function = jax.tree_util.Partial(function.__func__, function.__self__)
    leaves, structure = jax.tree.flatten(function)

    def call(*arrays: Any) -> Any:
        either = lambda leaf, array: leaf if array is None else array  # noqa: E731
        *given, own = jax.tree.map(either, (*args, leaves), arrays)
        called = reference or jax.tree.unflatten(structure, own)
        return arrays_in(called(*given))

    return jax.jit(call), arrays_in((*args, leaves))


def arrays_in(tree: Any) -> Any:
    """Return the tree with None in place of leaves that are not arrays."""
    is_array = lambda leaf: hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')  # noqa: E731
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def values(args: tuple[Any, ...], dtypes: list[Any], seed: int) -> list[np.ndarray]:
    """Return the arguments' leaves as NumPy arrays, with keys as integers.

    Abstract leaves get random values.

    Raises ValueError for an abstract argument of integers, because random integers would be
    meaningless, and for static arguments.
    """
    random, leaves = np.random.default_rng(seed), jax.tree_util.tree_leaves_with_path(args)
    if len(leaves) != len(dtypes):
        raise ValueError(
            f'the arguments have {len(leaves)} arrays, but the function takes {len(dtypes)}: bind '
            'its static arguments first, jax.jit(functools.partial(function, static))'
        )
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    pairs = zip(named, dtypes, strict=True)
    return [_value(name, leaf, dtype, random) for (name, leaf), dtype in pairs]


def _value(name: str, leaf: Any, dtype: Any, random: np.random.Generator) -> np.ndarray:
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return np.array(jax.random.key_data(leaf)) if is_key else np.array(leaf, dtype)
    if is_key or not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f'the argument{name} is abstract and of {dtype}: pass an array{_DRAWN}')
    # Rows have norm 1: matmuls of larger rows would saturate later functions and magnify rounding.
    scale = (leaf.shape[-1] or 1) ** -0.5 if leaf.shape else 1
    drawn = scale * random.normal(size=leaf.shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * scale * random.normal(size=leaf.shape)
    return np.asarray(drawn, dtype)


def _is_on_a_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, 'sharding', None), NamedSharding)
