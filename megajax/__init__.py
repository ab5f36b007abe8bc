"""Megatron-LM's tensor parallelism, written for JAX.

The package exports the names that a notebook or a script needs. Each is imported on first use, so
that `import megajax` is quick. `train`, `inspect` and `plan` are callable packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megajax.config import Config as Config
    from megajax.config import ConfigError as ConfigError
    from megajax.config import RunError as RunError
    from megajax.config import load as load
    from megajax.inspect import Inspect
    from megajax.model.loss import cross_entropy as cross_entropy
    from megajax.model.transformer import Decoder as Decoder
    from megajax.model.transformer import LanguageModel as LanguageModel
    from megajax.parallel.layout import Layout as Layout
    from megajax.parallel.mesh import make_mesh as make_mesh
    from megajax.parallel.placements import placements as placements
    from megajax.plan import PlanPackage
    from megajax.run.run import Run as Run
    from megajax.run.run import train as train
    from megajax.run.start import load_params as load_params
    from megajax.train.compiler_options import step_options as step_options
    from megajax.train.custom import gradients as gradients
    from megajax.train.custom import loss as loss
    from megajax.train.feed import place_batch as place_batch
    from megajax.train.step import TrainState as TrainState
    from megajax.train.step import init_state as init_state
    from megajax.train.step import make_train_step as make_train_step

    inspect: Inspect
    plan: PlanPackage
    __version__: str

__all__ = [
    'Config',
    'ConfigError',
    'Decoder',
    'LanguageModel',
    'Layout',
    'Run',
    'RunError',
    'TrainState',
    'cross_entropy',
    'gradients',
    'init_state',
    'inspect',
    'load',
    'load_params',
    'loss',
    'make_mesh',
    'make_train_step',
    'place_batch',
    'placements',
    'plan',
    'step_options',
    'train',
]

_HOMES = {
    'Config': 'megajax.config',
    'ConfigError': 'megajax.config',
    'Decoder': 'megajax.model.transformer',
    'LanguageModel': 'megajax.model.transformer',
    'Layout': 'megajax.parallel.layout',
    'Run': 'megajax.run.run',
    'RunError': 'megajax.config',
    'TrainState': 'megajax.train.step',
    'cross_entropy': 'megajax.model.loss',
    'gradients': 'megajax.train.custom',
    'init_state': 'megajax.train.step',
    'load': 'megajax.config',
    'load_params': 'megajax.run.start',
    'loss': 'megajax.train.custom',
    'make_mesh': 'megajax.parallel.mesh',
    'make_train_step': 'megajax.train.step',
    'place_batch': 'megajax.train.feed',
    'placements': 'megajax.parallel.placements',
    'step_options': 'megajax.train.compiler_options',
}
_CALLED = {'inspect': 'megajax.inspect', 'plan': 'megajax.plan', 'train': 'megajax.train'}


def __getattr__(name: str) -> Any:
    if name == '__version__':
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version('megajax')
        except PackageNotFoundError:  # a clone that is not installed
            return 'unknown'
    if name in _CALLED:
        return import_module(_CALLED[name])
    if name not in _HOMES:
        raise AttributeError(f'module megajax has no attribute {name!r}')
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
