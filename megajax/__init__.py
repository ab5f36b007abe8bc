"""Megatron-LM's parallelism for transformers, in JAX and Flax NNX.

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
    from megajax.core.train.feed import local_rows as local_rows
    from megajax.core.train.feed import place_batch as place_batch
    from megajax.core.train.optimizer import decays as decays
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

_NAMES = {
    'core.config': ('Config', 'ConfigError', 'RunError', 'load'),
    'core.model.loss': ('cross_entropy',),
    'core.model.transformer': ('Decoder', 'LanguageModel'),
    'core.parallel.layout': ('Layout',),
    'core.parallel.mesh': ('make_mesh',),
    'core.parallel.placements': ('placements',),
    'core.train.compiler_options': ('step_options',),
    'core.train.custom': ('gradients', 'loss'),
    'core.train.feed': ('local_rows', 'place_batch'),
    'core.train.optimizer': ('decays', 'learning_rate'),
    'core.train.step': ('TrainState', 'init_state', 'make_train_step'),
    'core.train.whole_matrices': ('on_whole_matrices',),
    'runtime.run.run': ('Run',),
    'runtime.run.start': ('load_params',),
}
_HOMES = {name: f'megajax.{home}' for home, names in _NAMES.items() for name in names}
_PACKAGES = {
    'compare': 'megajax.analysis.compare',
    'inspect': 'megajax.analysis.inspect',
    'plan': 'megajax.analysis.plan',
    'train': 'megajax.core.train',
}

__all__ = [*_HOMES, *_PACKAGES]

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
