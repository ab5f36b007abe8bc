"""Predict memory, time and the best layout of a training step, without compiling it.

`megajax.plan(config, gpu='h100', gpus=64)` needs no GPU.
"""

import sys
import types
from typing import Any

from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.result import Plan
from megajax.core.config import Config

__all__ = ['Plan', 'plan']


class PlanPackage(types.ModuleType):
    """Make the package callable: `megajax.plan(config, gpu='h100')`."""

    def __call__(self, config: Config, **keywords: Any) -> Plan:
        """Return the plan of a config; see `megajax.analysis.plan.planning.plan`."""
        return plan(config, **keywords)


sys.modules[__name__].__class__ = PlanPackage
