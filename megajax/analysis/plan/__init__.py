"""Memory, time and the best mesh of a training step, counted from a config without compiling.

`megajax.plan(config, gpu='h100', gpus=64)` plans for GPUs that need not be present.
"""

import sys
import types
from typing import Any

from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.result import Plan
from megajax.core.config import Config

__all__ = ['Plan', 'plan']


class PlanPackage(types.ModuleType):
    """The package as a callable: `megajax.plan(config, gpu='h100')`."""

    def __call__(self, config: Config, **keywords: Any) -> Plan:
        """Return the plan of a config; see `megajax.analysis.plan.planning.plan`."""
        return plan(config, **keywords)


sys.modules[__name__].__class__ = PlanPackage
