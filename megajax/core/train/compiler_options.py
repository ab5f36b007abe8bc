"""Options for XLA: for `train.overlap` and `train.deterministic`, and around known miscompiles."""

import jax

from megajax.core.config import Config, ConfigError, Problem
from megajax.core.counts.flash import uses_flash
from megajax.core.hardware.targets import capability_of
from megajax.core.train.overlap import overlap_options
from megajax.xla.miscompiles import (
    mesh_target,
    reject_affected,
    reject_pipelined_sends,
    workarounds,
)

Options = dict[str, str | bool]
# XLA sorts values that it would otherwise add atomically, and takes kernels of cuDNN and cuBLAS
# whose sums have one order. Which ones its autotuner took is in the run's cache of compiled
# programs.
DETERMINISTIC: Options = {'xla_gpu_exclude_nondeterministic_ops': True}


def step_options(config: Config) -> Options:
    """Options for the training step on the current mesh.

    Raises ConfigError for a config that the compiler would miscompile whatever its options, or with
    the options in XLA_FLAGS, and for one whose program would not run.
    """
    target = mesh_target()
    reject_affected(config, target)
    reject_pipelined_sends(config, target)
    if target == 'cpu':
        return workarounds(target)
    _refuse_unrolled_attention(config)
    deterministic = DETERMINISTIC if config.train.deterministic else {}
    return {**overlap_options(config), **deterministic, **workarounds(target)}


def evaluation_options() -> Options:
    """Options for the evaluation step on the current mesh."""
    return workarounds(mesh_target())


def _refuse_unrolled_attention(config: Config) -> None:
    """Raise ConfigError for a deterministic step with cuDNN's attention in several places."""
    train = config.train
    capability = capability_of(jax.sharding.get_abstract_mesh().abstract_device)
    if train.deterministic and train.unroll is True and uses_flash(config, capability):
        message = (
            "XLA cannot run cuDNN's deterministic attention in layers that are compiled on their "
            'own: on an H100, jax 0.11.2 ended in the first step with an IndexError; '
            'use train.unroll=false, or leave it at auto'
        )
        raise ConfigError(Problem(path='train.unroll', message=message))
