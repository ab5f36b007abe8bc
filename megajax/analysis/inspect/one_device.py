"""The config of the step on one device with which a step on a mesh is compared."""

from collections.abc import Mapping
from typing import Any

from megajax.core.config import Config, MeshConfig

# How a step is divided among devices and in time, with the values of one device. These keys change
# no result: all configs that differ in them alone have the same reference.
LAYOUT: dict[str, dict[str, Any]] = {
    'mesh': MeshConfig().model_dump(),
    'train': {
        'microbatches': 1,
        'recompute': 'none',
        'schedule': '1f1b',
        'overlap': 'none',
        'unroll': False,
    },
    'optim': {'shard': 'none', 'reduce_dtype': 'float32'},
}
# Of `train`, without the keys that have an effect in other dtypes only.
IN_FP32 = {'dtype': 'float32', 'fp8_scaling': 'delayed', 'loss_scale': 'auto'}


def on_one_device(config: Config, *, exact: bool) -> Config:
    """Return the config of the reference; with `exact`, it computes in fp32."""
    train = LAYOUT['train'] | (IN_FP32 if exact else {})
    return updated(config, **LAYOUT | {'train': train})


def updated(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Return the config with new values for these keys, validated."""
    written = config.model_dump(exclude_unset=True)
    for name, values in sections.items():
        written[name] = written.get(name, {}) | dict(values)
    return Config.model_validate(written)
