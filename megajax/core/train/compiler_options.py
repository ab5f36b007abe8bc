"""Options for XLA: for `train.overlap` and `train.deterministic`, and against miscompiles."""

import jax

from megajax.core.config import Config, mistake
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flash import uses_flash
from megajax.core.hardware.targets import GPUS, capability_of
from megajax.core.parallel.mesh import check_current_mesh
from megajax.core.train.overlap import overlap_options
from megajax.xla.miscompiles import (
    mesh_target,
    reject_affected,
    reject_pipelined_sends,
    workarounds,
)

Options = dict[str, str | bool]
# XLA sorts values that it would otherwise add atomically, and uses kernels of cuDNN and cuBLAS that
# add in a fixed order. The run's cache of compiled programs stores which ones the autotuner chose.
DETERMINISTIC: Options = {'xla_gpu_exclude_nondeterministic_ops': True}


def step_options(config: Config) -> Options:
    """Return the options for the training step on the current mesh.

    Raises ConfigError if the current mesh is not the config's, if the compiler would miscompile the
    config with any options, or with the options in XLA_FLAGS, and if the program would not run.
    """
    check_current_mesh(config)  # without a mesh, the options would be those for a CPU
    target = mesh_target()
    config = resolved(config, on_gpu=target in GPUS)
    reject_affected(config, target)
    reject_pipelined_sends(config, target)
    if target not in GPUS:
        return workarounds(target)
    _refuse_unrolled_attention(config)
    deterministic = DETERMINISTIC if config.train.deterministic else {}
    return {**overlap_options(config), **deterministic, **workarounds(target)}


def evaluation_options() -> Options:
    """Return the options for the evaluation step on the current mesh."""
    return workarounds(mesh_target())


def _refuse_unrolled_attention(config: Config) -> None:
    """Raise ConfigError for a deterministic step with several calls of cuDNN's attention."""
    train = config.train
    capability = capability_of(jax.sharding.get_abstract_mesh().abstract_device)
    if train.deterministic and train.unroll is True and uses_flash(config, capability):
        message = (
            "XLA cannot run cuDNN's deterministic attention in layers that are compiled on their "
            'own: on an H100, jax 0.11.2 ended in the first step with an IndexError; '
            'use train.unroll=false, or leave it at auto'
        )
        raise mistake('train.unroll', message)
