"""Megatron-LM's tensor parallelism as JAX wants it.

The names that a notebook needs; each is imported when it is first used, so that `import megajax` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megajax.config import Config, ConfigError, load
    from megajax.model.decoder import Decoder
    from megajax.parallel.mesh import make_mesh
    from megajax.train.step import TrainState, init_state, make_train_step, place_batch

_HOMES = {
    'Config': 'megajax.config',
    'ConfigError': 'megajax.config',
    'load': 'megajax.config',
    'Decoder': 'megajax.model.decoder',
    'make_mesh': 'megajax.parallel.mesh',
    'TrainState': 'megajax.train.step',
    'init_state': 'megajax.train.step',
    'make_train_step': 'megajax.train.step',
    'place_batch': 'megajax.train.step',
    'placements': 'megajax.train.placements',
}

__all__ = list(_HOMES)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'megajax has no {name!r}; it has {", ".join(sorted(_HOMES))}')
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
