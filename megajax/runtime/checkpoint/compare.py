"""Find the differences between two checkpoints, or a checkpoint and the run that restores it."""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.base.render.text import typed
from megajax.core.config import CheckpointError, ConfigError, OptimConfig
from megajax.core.config.overrides import typed_override
from megajax.core.parallel.layer_order import without_known_order
from megajax.core.train.optimizer import make_schedule
from megajax.runtime.checkpoint import old_names
from megajax.runtime.checkpoint.kept_weights import model_differences
from megajax.runtime.checkpoint.orbax_manager import gb_to_read
from megajax.runtime.checkpoint.record import (
    AT_THE_START,
    START_FROM,
    TOKENIZER,
    Record,
    changed_corpora,
    has_other_tokenizer,
    is_fixed,
    other_differences,
    version_differences,
)

BLOCK = 1 << 24  # number of elements compared at a time
SHOWN = 3  # maximum number of arrays named in an error
RECENT = 'recent'  # amax history of fp8, which is measured again if it is missing
MOMENT = re.compile(r'opt_state/.*/(mu|nu)/')  # pattern of the names of moments

logger = logging.getLogger(__name__)

Kind = tuple[tuple[int, ...], str]
Kinds = dict[str, Kind]
Rename = Callable[[Any], Any]


def check_same_model(path: Path, there: Record, here: Record, *, is_import: bool) -> None:
    """Raise ConfigError if a resumed run changes model, optimizer, dtype or tokenizer.

    The error names every difference. An import has only weights, so the keys that a run with
    `run.start_from` may change may also differ from an import.
    """
    free, keys = model_differences(there, here)
    if not is_import:
        keys |= {key: pair for key, pair in free.items() if is_fixed(key, *pair)}
    keys = dict(sorted(keys.items()))
    different = [f'{key} {a} there, {b} here' for key, (a, b) in keys.items()]
    other_tokenizer = has_other_tokenizer(there, here)
    if other_tokenizer:
        different.append(f'tokenizer {there.tokenizer_sha256} there, {here.tokenizer_sha256} here')
    if different:
        fix = 'change these back, or choose another run.dir'
        changed = [key for key in keys if key.startswith('lora.') and None not in keys[key]]
        if not other_tokenizer and keys.keys() <= {*free, *changed}:
            back = 'change it back' if len(keys) == 1 else 'change these back'
            fix = f'{back}, or {_with_its_weights(path.parent.parent, merges=bool(changed))}'
        elif not keys:
            override = typed_override('data.tokenizer', path / TOKENIZER)
            fix = f'set {override}, or choose another run.dir'
        of = 'optimizer' if all(line.startswith('optim.') for line in different) else 'model'
        raise ConfigError(f'{path} contains a different {of} ({"; ".join(different)}): {fix}')


def _with_its_weights(run: Path, *, merges: bool) -> str:
    """Return how to begin a new run with a run's weights, also if its adapters must be merged."""
    if not merges:
        return f'begin a new run with {typed_override("run.start_from", run)}'
    return (
        f'merge its adapters and begin a new run with others: megajax export hf {typed(run)} '
        'MERGED, megajax import hf MERGED BASE, megajax train run.start_from=BASE lora.rank=...'
    )


def check_same_data(path: Path, there: Record, here: Record) -> None:
    """Raise ConfigError if data of the same name has changed, unless `run.allow_changed_data`."""
    changed = changed_corpora(there, here)
    if changed and not here.config['run']['allow_changed_data']:
        lines = [f'{name} {a[:12]} there, {b[:12]} here' for name, (a, b) in changed.items()]
        fix = 'restore it, choose another run.dir, or set run.allow_changed_data=true'
        changes = f'SHA-256 of {"; ".join(lines)}'
        raise ConfigError(
            f'{path} was trained on different data of the same name ({changes}): {fix}'
        )


def log_differences(there: Record, here: Record, *, is_import: bool) -> None:
    """Log the permitted changes of a resumed run, and changes that no longer have an effect."""
    without_effect = {START_FROM} if is_import else AT_THE_START
    different = other_differences(there, here)
    if is_import:
        different |= model_differences(there, here)[0]
    for key, (old, new) in different.items():
        effect = (
            ', without effect: this run has begun; choose another run.dir for it'
            if key in without_effect
            else ''
        )
        logger.info('resume     %s: %s -> %s%s', key, old, new, effect)
    for name, (old, new) in version_differences(there, here).items():
        logger.warning(
            'resume     %s %s -> %s: the results may differ in their last bits from a run with '
            'one version',
            name,
            old,
            new,
        )


def log_schedule(there: Record, here: Record, taken: int) -> None:
    """Log how the changes of a resumed run affect the learning rate, if they affect it.

    The next step has the rate after `taken` steps, since skipped steps do not count.
    """
    (optim, steps), (old_optim, old_steps) = map(_schedule, (here, there))
    if (optim, steps) == (old_optim, old_steps):
        return  # jax takes longer for the rates than for all other comparisons
    ends, old_ends = optim.decay_steps or steps, old_optim.decay_steps or old_steps
    rate, old_rate = (
        float(make_schedule(*pair)(taken)) for pair in ((optim, steps), (old_optim, old_steps))
    )
    end = ''
    if ends != old_ends and optim.schedule != 'constant':
        end = (
            f', and min_lr at step {ends} instead of {old_ends}; '
            f'optim.decay_steps={old_ends} keeps the old end'
        )
    if end or rate != old_rate:
        logger.info(
            'resume     learning rate: %.4g at step %d, which had %.4g before the change%s',
            rate,
            there.step + 1,
            old_rate,
            end,
        )


def _schedule(record: Record) -> tuple[OptimConfig, int]:
    optim = record.config['optim']
    known = {key: value for key, value in optim.items() if key in OptimConfig.model_fields}
    return OptimConfig.model_validate(known), record.config['train']['steps']


def check_same_arrays(
    path: Path, abstract: Any, *, under: str = '', any_dtype: bool = False
) -> None:
    """Raise ConfigError if names, shapes or dtypes of a checkpoint's arrays differ from `abstract`.

    Orbax would silently cast, cut and pad the arrays. Only the moments may have a different dtype
    (`optim.moments_dtype`); with `any_dtype`, all arrays may. With `under`, only arrays whose names
    start with it are compared.
    """
    both = _saved_kinds(path), _kinds(abstract)
    there, here = (
        {name: kind for name, kind in kinds.items() if name.startswith(under)} for kinds in both
    )
    names = [
        name
        for name in sorted(there.keys() | here.keys())
        if _fixed_part(name, there.get(name), any_dtype=any_dtype)
        != _fixed_part(name, here.get(name), any_dtype=any_dtype)
        and not (name == RECENT and (name not in there or name not in here))
    ]
    if names:
        lines = [
            f'{name} {_kind(there, name)} there, {_kind(here, name)} here' for name in names[:SHOWN]
        ]
        more = f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''
        fix = (
            'use the config, the optimizer and the version of megajax that wrote it, '
            'or choose another run.dir'
        )
        raise ConfigError(f'{path} contains different arrays ({"; ".join(lines)}{more}): {fix}')


def check_same_order(path: Path, there: Record, here: Record, state: Any) -> None:
    """Raise ConfigError if the layers of an optimizer's state would get a different order.

    A checkpoint has the layers in the order of the model, except in the state of an optimizer that
    is not shaped like its parameters: it has them in the order of the stages that wrote it.
    """
    if (a := _stages(there)) == (b := _stages(here)) or not (arrays := without_known_order(state)):
        return
    raise ConfigError(
        f'{path} contains the state of an optimizer that is not shaped like its parameters (shape '
        f'{arrays[0].shape}, for example): its layers are in the order of mesh.stages={a[0]} '
        f'mesh.virtual_stages={a[1]}, not of mesh.stages={b[0]} mesh.virtual_stages={b[1]}; '
        'restore it with these stages, or begin a new run with '
        f'{typed_override("run.start_from", path.parent.parent)}'
    )


def _stages(record: Record) -> tuple[int, int]:
    """Return the stages and the chunks of each, (1, 1) if the layers are in the model's order."""
    mesh = record.config.get('mesh', {})
    chunks = mesh.get('virtual_stages', 1)
    return (mesh.get('stages', 1), chunks) if chunks > 1 else (1, 1)


def changed_shapes(a: Any, b: Any) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shape in tree b of each array that has a different shape in tree a."""
    before = _kinds(a)
    return {name: shape for name, (shape, _) in _kinds(b).items() if shape != before[name][0]}


def holds_array(path: Path, name: str) -> bool:
    """Whether a checkpoint has an array of this name."""
    return name in _saved_kinds(path)


def renames(path: Path) -> tuple[Rename, Rename]:
    """Return two functions that rename a tree: to a checkpoint's names, and to current names."""
    if not _has_old_names(path):
        return lambda tree: tree, lambda tree: tree
    return (
        lambda tree: old_names.renamed(tree, old_names.old),
        lambda tree: old_names.renamed(tree, old_names.current),
    )


def _has_old_names(path: Path) -> bool:
    return any(old_names.OLD.search(name) for name in _raw_kinds(path))


def holds_parameters_only(path: Path) -> bool:
    """Whether a checkpoint is an import, without an optimizer."""
    return all(name.startswith('params/') for name in _saved_kinds(path))


def parameter_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter in a checkpoint, by its name."""
    return {_short(name): shape for name, (shape, _) in _parameters(path).items()}


def read_parameter(path: Path, name: str) -> np.ndarray:
    """Read one parameter of a checkpoint, unsharded, into the memory of this host."""
    parameters = _parameters(path)
    return _read(path, next(long for long in parameters if _short(long) == name), parameters)


def parameter_differences(a: Path, b: Path) -> Iterator[tuple[str, float | str]]:
    """Yield max |a - b| / max |b| for each parameter of either step, or why it cannot be compared.

    Only one parameter at a time is in the memory of this host.
    """
    left, right = _parameters(a), _parameters(b)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield _short(name), f'{_kind(left, name)} and {_kind(right, name)}'
        else:
            yield _short(name), _difference(_read(a, name, left), _read(b, name, right))


def _parameters(step: Path) -> Kinds:
    return {name: kind for name, kind in _saved_kinds(step).items() if name.startswith('params/')}


def _saved_kinds(step: Path) -> Kinds:
    """Return the arrays of a checkpoint by the names of this version."""
    return {old_names.current(name): kind for name, kind in _raw_kinds(step).items()}


def _raw_kinds(step: Path) -> Kinds:
    state = (step / 'state').absolute()
    try:
        written = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in state.iterdir()
        ]
        return _kinds_in(state, tuple(sorted(written)))
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(
            f'the list of arrays in {step} cannot be read ({why}): '
            f'run megajax checkpoint verify {typed(step)}'
        ) from error


@functools.lru_cache(maxsize=4)
def _kinds_in(state: Path, written: tuple[tuple[str, int, int], ...]) -> Kinds:
    """Return the arrays in a folder with these files.

    The result is cached, because each read of a parameter needs it and Orbax takes 20 ms to list
    the arrays.
    """
    # A Checkpointer would look for its own metadata file there, and warn that there is none.
    return _kinds(ocp.PyTreeCheckpointHandler().metadata(state).tree)


def _kinds(tree: Any) -> Kinds:
    """Return the shape and dtype of each array of a state or of its metadata, by name."""
    leaves = ocp.tree.to_flat_dict(tree, sep='/').items()
    return {
        name: (tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in leaves
        if getattr(leaf, 'shape', None) is not None
    }


def _fixed_part(name: str, kind: Kind | None, *, any_dtype: bool) -> Any:
    """Return the part of an array's kind that must be equal in a resumed run."""
    return kind[0] if kind and (any_dtype or MOMENT.match(name)) else kind


def _read(step: Path, name: str, parameters: Kinds) -> np.ndarray:
    shape, dtype = parameters[name]
    item: Any = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    restore: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    keys = (old_names.old(name) if _has_old_names(step) else name).split('/')
    for key in reversed(keys):
        item, restore = {key: item}, {key: restore}
    gb = gb_to_read(math.prod(shape))
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=gb)
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore, partial_restore=True)
        value = checkpointer.restore((step / 'state').absolute(), args=args)
    for key in keys:
        value = value[key]
    return np.asarray(value)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.reshape(-1), b.reshape(-1)
    difference = size = 0.0
    for start in range(0, a.size, BLOCK):
        x, y = (array[start : start + BLOCK].astype(np.float64) for array in (a, b))
        # np.maximum propagates NaN.
        difference = np.maximum(difference, np.abs(x - y).max())
        size = np.maximum(size, np.abs(y).max())
    return float(difference / size) if size else float(difference and np.inf)


def _kind(kinds: Kinds, name: str) -> str:
    if name not in kinds:
        return 'missing'
    shape, dtype = kinds[name]
    return f'{dtype}[{",".join(map(str, shape))}]'


def _short(name: str) -> str:
    return name.removeprefix('params/').removesuffix('/value').replace('/', '.')
