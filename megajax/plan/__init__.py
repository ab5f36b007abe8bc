"""Will it fit, how fast, on which mesh: counted from a config, without compiling.

`megajax.plan(config, gpu='h100', gpus=64)` says it for GPUs that need not be there.
"""

import sys
import types
from typing import Any

from megajax.config import Config
from megajax.plan.planning import plan
from megajax.plan.result import Plan

__all__ = ['Plan', 'plan']


class PlanPackage(types.ModuleType):
    """The package, which can be called: `megajax.plan(config, gpu='h100')`."""

    def __call__(self, config: Config, **keywords: Any) -> Plan:
        """See `megajax.plan.planning.plan`."""
        return plan(config, **keywords)


sys.modules[__name__].__class__ = PlanPackage
