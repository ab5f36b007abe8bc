"""Collectives over `model` made by hand."""

from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.program import Array


def reduced(op_name: str, array: Array, *, times: int = 1) -> Collective:
    """An all-reduce of an array over two devices."""
    return Collective(
        kind='all-reduce',
        axes=('model',),
        groups=((0, 1),),
        operand=array,
        result=array,
        times=times,
        at_most=False,
        op_name=op_name,
        source='',
        computation='main',
        instruction='all-reduce',
        synchronous=False,
        overlapped_flops=0,
    )
