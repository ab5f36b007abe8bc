"""Predict memory, time and the best layout of a training step, without compiling it.

`megajax.plan(config, gpu='h100', gpus=64)` needs no GPU.
"""

import sys
import types

from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.result import Plan

__all__ = ['Plan', 'plan']


class PlanPackage(types.ModuleType):
    """The type of this package, which makes it callable: `megajax.plan(config, gpu='h100')`."""

    __call__ = staticmethod(plan)


sys.modules[__name__].__class__ = PlanPackage
