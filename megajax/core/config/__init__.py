"""The config of a run: its schema, presets, files, overrides, and rules between keys.

Imports no jax.
"""

from megajax.base.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    MiscompileError,
    NumericError,
    Problem,
    RunError,
    StopRequested,
    mistake,
)
from megajax.core.config.layer import LayerConfig, RopeScaling
from megajax.core.config.load import dump, load, overridden, presets, recipes, reload
from megajax.core.config.lora import LoraConfig
from megajax.core.config.mesh import MeshConfig
from megajax.core.config.model import ModelConfig
from megajax.core.config.optim import OptimConfig
from megajax.core.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LossConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
)
from megajax.core.config.vision import VisionConfig

__all__ = [
    'CheckpointConfig',
    'CheckpointError',
    'Config',
    'ConfigError',
    'CorruptionError',
    'DataConfig',
    'LayerConfig',
    'LoraConfig',
    'LossConfig',
    'MeshConfig',
    'MiscompileError',
    'ModelConfig',
    'NumericError',
    'OptimConfig',
    'Problem',
    'ProfileConfig',
    'RopeScaling',
    'RunConfig',
    'RunError',
    'StopRequested',
    'TrainConfig',
    'VisionConfig',
    'dump',
    'load',
    'mistake',
    'overridden',
    'presets',
    'recipes',
    'reload',
]
