"""Memory, time and the best mesh of a training step, counted from a config without compiling.

`megajax.plan(config, gpu='h100', gpus=64)` plans for GPUs that need not be present.
"""

import sys
import types
from typing import Any

from megajax.config import Config
from megajax.plan.planning import plan
from megajax.plan.result import Plan

__all__ = ['Plan', 'plan']


class PlanPackage(types.ModuleType):
    """The package as a callable: `megajax.plan(config, gpu='h100')`."""

    def __call__(self, config: Config, **keywords: Any) -> Plan:
        """Return the plan of a config; see `megajax.plan.planning.plan`."""
        return plan(config, **keywords)


sys.modules[__name__].__class__ = PlanPackage
