"""The record of a matmul of a training step, by its sizes on one device."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

Phase = Literal['forward', 'backward', 'recompute', 'step']
Where = Literal['layers', 'attention', 'head', 'optimizer']
DENSE = 'dense '  # before the names of an MLP's matmuls in a model that also has experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`batch` matmuls [m, k] x [k, n] in a kernel that runs `times` times in a step."""

    name: str
    where: Where
    phase: Phase
    sizes: tuple[int, int, int]  # m, n, k
    batch: int = 1
    times: int
    flash: bool = False
    is_causal: bool = False  # attention whose mask hides half of the scores
    of_experts: bool = False  # a matmul of rows that are sent to experts

    @property
    def has_fp8_operands(self) -> bool:
        """Whether its operands are FP8 in a step with fp8, as in the decoder's linear layers.

        The matmuls of adapters, of an encoder and of cross-attention are in 16 bits.
        """
        first, *rest = self.name.split()
        is_other = first in ('vision', 'cross', 'relevance') or bool({'A', 'B'} & {*rest})
        return self.where == 'layers' and not is_other

    @property
    def flops(self) -> int:
        """The FLOPs of one run, with those that a causal kernel can skip; a multiply-add is two."""
        m, n, k = self.sizes
        return 2 * self.batch * m * n * k

    @property
    def elements(self) -> int:
        """The number of elements of operands and result.

        It is 0 for flash attention, whose large arrays never leave the GPU's cores.
        """
        m, n, k = self.sizes
        return 0 if self.flash else self.batch * (m * n + n * k + m * k)


def product_and_gradients(
    name: str,
    m: int,
    n: int,
    k: int,
    times: int,
    *,
    where: Where = 'layers',
    of_input: bool = True,
    of_weight: bool = True,
    batch: int = 1,
    of_experts: bool = False,
) -> Iterator[Product]:
    """Yield [m, k] x [k, n] and, by default, the gradients of its weight and of its input."""
    sizes = {'': (m, n, k), ' input': (m, k, n), ' weight': (k, n, m)}
    for suffix, size in sizes.items():
        phase: Phase = 'backward' if suffix else 'forward'
        if {'': True, ' input': of_input, ' weight': of_weight}[suffix]:
            yield Product(
                name=name + suffix,
                where=where,
                phase=phase,
                sizes=size,
                batch=batch,
                times=times,
                of_experts=of_experts,
            )
