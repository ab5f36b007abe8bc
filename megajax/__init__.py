"""Megatron-LM's tensor parallelism, written for JAX.

The package exports the names that a notebook or a script needs. Each is imported on first use, so
that `import megajax` is quick. `train`, `inspect` and `plan` are callable packages.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megajax.old_names import OldNames

if TYPE_CHECKING:
    from types import ModuleType

    from megajax.analysis.inspect import Inspect
    from megajax.analysis.plan import PlanPackage
    from megajax.core.config import Config as Config
    from megajax.core.config import ConfigError as ConfigError
    from megajax.core.config import RunError as RunError
    from megajax.core.config import load as load
    from megajax.core.model.loss import cross_entropy as cross_entropy
    from megajax.core.model.transformer import Decoder as Decoder
    from megajax.core.model.transformer import LanguageModel as LanguageModel
    from megajax.core.parallel.layout import Layout as Layout
    from megajax.core.parallel.mesh import make_mesh as make_mesh
    from megajax.core.parallel.placements import placements as placements
    from megajax.core.train.compiler_options import step_options as step_options
    from megajax.core.train.custom import gradients as gradients
    from megajax.core.train.custom import loss as loss
    from megajax.core.train.feed import place_batch as place_batch
    from megajax.core.train.optimizer import learning_rate as learning_rate
    from megajax.core.train.step import TrainState as TrainState
    from megajax.core.train.step import init_state as init_state
    from megajax.core.train.step import make_train_step as make_train_step
    from megajax.core.train.whole_matrices import on_whole_matrices as on_whole_matrices
    from megajax.runtime.run.run import Run as Run
    from megajax.runtime.run.run import train as train
    from megajax.runtime.run.start import load_params as load_params

    compare: ModuleType
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
    'compare',
    'cross_entropy',
    'gradients',
    'init_state',
    'inspect',
    'learning_rate',
    'load',
    'load_params',
    'loss',
    'make_mesh',
    'make_train_step',
    'on_whole_matrices',
    'place_batch',
    'placements',
    'plan',
    'step_options',
    'train',
]

_HOMES = {
    'Config': 'megajax.core.config',
    'ConfigError': 'megajax.core.config',
    'Decoder': 'megajax.core.model.transformer',
    'LanguageModel': 'megajax.core.model.transformer',
    'Layout': 'megajax.core.parallel.layout',
    'Run': 'megajax.runtime.run.run',
    'RunError': 'megajax.core.config',
    'TrainState': 'megajax.core.train.step',
    'cross_entropy': 'megajax.core.model.loss',
    'gradients': 'megajax.core.train.custom',
    'init_state': 'megajax.core.train.step',
    'learning_rate': 'megajax.core.train.optimizer',
    'load': 'megajax.core.config',
    'load_params': 'megajax.runtime.run.start',
    'loss': 'megajax.core.train.custom',
    'make_mesh': 'megajax.core.parallel.mesh',
    'make_train_step': 'megajax.core.train.step',
    'on_whole_matrices': 'megajax.core.train.whole_matrices',
    'place_batch': 'megajax.core.train.feed',
    'placements': 'megajax.core.parallel.placements',
    'step_options': 'megajax.core.train.compiler_options',
}
_PACKAGES = {
    'compare': 'megajax.analysis.compare',
    'inspect': 'megajax.analysis.inspect',
    'plan': 'megajax.analysis.plan',
    'train': 'megajax.core.train',
}
sys.meta_path.insert(0, OldNames())


def __getattr__(name: str) -> Any:
    if name == '__version__':
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version('megajax')
        except PackageNotFoundError:  # a clone that is not installed
            return 'unknown'
    if name in _PACKAGES:
        return import_module(_PACKAGES[name])
    if name not in _HOMES:
        raise AttributeError(f'module megajax has no attribute {name!r}')
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
