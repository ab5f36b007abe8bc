"""The matrix products of a compiled step, compared with those that its config requires."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from megajax.config import Config
from megajax.counts import products as counts
from megajax.counts.declaration import NUM_SEGMENTS
from megajax.counts.flops import uses_flash
from megajax.hlo.products import is_rematerialized, products
from megajax.hlo.program import Program
from megajax.inspect.result import Finding, Products

TOLERANCE = 1e-3
PADDED = 8  # elements; XLA pads the sizes of cuBLAS's 16-bit products to a multiple of it


def count_products(config: Config, program: Program, target: str) -> Products:
    """Count the FLOPs of a step on one device: in the compiled program, and by the config.

    XLA computes exactly the products that `counts/products.py` lists, whatever the family, the
    layout and the recomputation. A CPU has no flash attention.
    """
    flash = uses_flash(config) and target != 'cpu'
    required = counts.products(config, flash=flash)
    expected = sum(product.times * product.flops for product in required)
    compiled = rematerialized = 0
    for product, computation, instruction, times in products(program):
        compiled += times * product.flops
        if is_rematerialized(program, computation, instruction):
            rematerialized += times * product.flops
    return Products(compiled=compiled, expected=expected, rematerialized=rematerialized)


def padding(config: Config) -> int:
    """FLOPs that XLA may add on one device where it pads 16-bit products for cuBLAS.

    It pads sizes to multiples of 8. Only the products of BERT's first tokens, with one row per
    sequence, have smaller sizes; the difference shows only in tiny models.
    """
    if not config.model.is_bert or config.train.dtype == 'float32':
        return 0
    D, rows = config.model.hidden_size, config.microbatch_rows
    padded = -(-rows // PADDED) * PADDED
    added = D * (padded * (D + PADDED) - rows * (D + NUM_SEGMENTS))
    return 3 * 2 * added * config.train.microbatches


def products_run_twice(config: Config, program: Program, products: Products) -> Iterator[Finding]:
    """Yield an error if the compiled step computes more than its config requires.

    Products that XLA repeats because memory is short are a note.
    """
    if products.rematerialized:
        message = (
            f'XLA computes {products.rematerialized / 1e9:,.1f} GFLOP of matrix products a second '
            'time, because the step does not fit into the memory of a device: use more devices or '
            'microbatches, or recompute more (train.recompute)'
        )
        yield Finding(level='note', rule='products run again for memory', message=message)
    wanted = products.compiled - products.rematerialized
    if wanted - padding(config) <= products.expected * (1 + TOLERANCE):
        return
    more = (wanted - products.expected) / 1e9
    again = _repeated(program)
    which = f'; there is more than one of {", ".join(again)}' if again else ''
    message = (
        f'each device computes {more:,.1f} GFLOP of matrix products more than the config requires '
        f'({products.ratio:.3f} of it){which}: jax 0.11 clones a product that is both used and '
        'stored, unless XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false'
    )
    yield Finding(level='error', rule='products run twice', message=message)


def _repeated(program: Program, limit: int = 3) -> list[str]:
    """The largest products that have the same path and the same arrays as another product."""
    seen = set[tuple[Any, ...]]()
    again = Counter[str]()
    for product, computation, instruction, times in products(program):
        arrays = [computation.by_name[name].results[0] for name in instruction.operands]
        key = instruction.op_name, tuple(arrays), instruction.results[0]
        if key in seen:
            source = ' < '.join(program.source(instruction).split(' < ')[:2])
            again[f'{instruction.op_name} ({source})'] += times * product.flops
        seen.add(key)
    return [f'{place}, {flops / 1e9:,.1f} GFLOP' for place, flops in again.most_common(limit)]
