"""Options for XLA: for `train.overlap`, and as workarounds for known miscompiles."""

from megajax.config import Config
from megajax.miscompiles import cures, mesh_target, refuse_bitten, refuse_pipelined_sends
from megajax.train.overlap import overlap_options

Options = dict[str, str | bool]


def step_options(config: Config) -> Options:
    """Options for the training step on the current mesh.

    Raises ConfigError for a config that the compiler would miscompile whatever its options, or with
    those of XLA_FLAGS.
    """
    target = mesh_target()
    refuse_bitten(config, target)
    refuse_pipelined_sends(config, target)
    overlap = overlap_options(config) if target != 'cpu' else {}
    return {**overlap, **cures(target)}


def evaluation_options() -> Options:
    """Options for the evaluation step on the current mesh."""
    return cures(mesh_target())
