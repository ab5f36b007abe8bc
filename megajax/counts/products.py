"""Every matrix product of a training step, by its sizes on one device.

FLOPs (`flops.py`), the time of a step (`plan/time.py`) and what `inspect` expects of a compiled
program follow from this list, and the list from the declared parameters and their layout.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal

from megajax.config.schema import Config
from megajax.counts.parameters import Parameter, declare, dim_sizes, parameters
from megajax.parallel.layout import Layout

Phase = Literal['forward', 'backward', 'recompute', 'step']
Where = Literal['layers', 'attention', 'head']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`batch` matrix products [m, k] x [k, n] in one kernel, and how often that runs in a step."""

    name: str
    where: Where
    phase: Phase
    sizes: tuple[int, int, int]  # m, n, k
    batch: int = 1
    times: int
    flash: bool = False

    @property
    def flops(self) -> int:
        """Of one run, including what a causal kernel can skip; a multiply-add is two."""
        m, n, k = self.sizes
        return 2 * self.batch * m * n * k

    @property
    def elements(self) -> int:
        """Of operands and result; flash attention keeps the large ones in the GPU's cores."""
        m, n, k = self.sizes
        return 0 if self.flash else self.batch * (m * n + n * k + m * k)


def products(
    config: Config, *, flash: bool, layout: Layout | None = None, recomputes_last: bool = False
) -> list[Product]:
    """The products of a step on one device of `layout`, by default of the layout of `config`.

    The backward pass of a product is two of the same FLOPs: gradients of its input and of its
    weight. Full recomputation leaves out the last product of a layer, which the backward pass does
    not need, unless `recomputes_last`.
    """
    layout = layout or Layout.of(config)
    rows = config.train.batch_size // (layout.num_shards('B') * config.train.microbatches)
    counted = _Counted(config, layout.shards, rows)
    return [
        *counted.layers(recomputes_last=recomputes_last),
        *counted.attention(flash=flash),
        *counted.heads(),
    ]


@dataclasses.dataclass(frozen=True)
class _Counted:
    config: Config
    shards: Mapping[str, int]
    rows: int  # of a microbatch on a data shard

    @property
    def tokens(self) -> int:
        return self.rows * self.config.train.seq_len

    def layers(self, *, recomputes_last: bool) -> Iterator[Product]:
        """Those with the weights of the layers."""
        train = self.config.train
        weights = [
            (name.split('.')[-2], parameter)
            for name, parameter in parameters(self.config.model)
            if parameter.is_stacked and parameter.is_matrix
        ]
        times = self.config.model.num_layers * train.microbatches
        for place, (name, parameter) in enumerate(weights, start=1):
            yield from self._with_weight(name, 'layers', parameter, self.tokens, times)
            if train.recompute == 'full' and (place < len(weights) or recomputes_last):
                n, k = self._output_and_input(parameter)
                sizes = self.tokens, n, k
                yield Product(
                    name=name, where='layers', phase='recompute', sizes=sizes, times=times
                )

    def attention(self, *, flash: bool) -> Iterator[Product]:
        """Scores and values, two products of the same FLOPs; backward four.

        With a flash kernel the backward pass also runs the forward kernel again, and its own
        computes the scores again.
        """
        model, train = self.config.model, self.config.train
        heads = self.rows * model.num_heads // self.shards.get('N', 1)
        counts: dict[Phase, int] = {'forward': 2, 'backward': 7 if flash else 4, 'recompute': 0}
        if train.recompute == 'full' or (train.recompute == 'selective' and not flash):
            counts['recompute'] = 2 if train.recompute == 'full' else 1
        sizes, runs = (train.seq_len, train.seq_len, model.head_dim), train.microbatches
        for phase, count in counts.items():
            yield Product(
                name='attention',
                where='attention',
                phase=phase,
                sizes=sizes,
                batch=heads,
                times=count * model.num_layers * runs,
                flash=flash,
            )

    def heads(self) -> Iterator[Product]:
        """Logits of every token; BERT's dense layer of every token, and two of each row's first.

        Sequence parallelism shares out the dense layer; the two of a row are on every device.
        """
        declared = declare(self.config.model)
        runs, embedding = self.config.train.microbatches, declared['embedding']
        table = declared.get('head') or embedding['table']  # type: ignore[index]
        head = Parameter(table.dims[::-1], table.role)  # type: ignore[union-attr]
        yield from self._with_weight('head', 'head', head, self.tokens, runs)
        tokens = self.tokens // self.shards.get('T', 1)
        for name, parameter in parameters(self.config.model):
            if parameter.is_matrix and not parameter.is_stacked and 'V' not in parameter.dims:
                rows = tokens if parameter.partial else self.rows
                label = name.split('.')[-2]
                yield from self._with_weight(label, 'head', parameter, rows, runs)

    def _with_weight(
        self, name: str, where: Where, weight: Parameter, rows: int, times: int
    ) -> Iterator[Product]:
        n, k = self._output_and_input(weight)
        sizes = {'': (rows, n, k), ' input': (rows, k, n), ' weight': (k, n, rows)}
        for suffix, size in sizes.items():
            phase: Phase = 'backward' if suffix else 'forward'
            yield Product(name=name + suffix, where=where, phase=phase, sizes=size, times=times)

    def _output_and_input(self, weight: Parameter) -> tuple[int, int]:
        """Sizes on a device; the input dims are the first one if it is D, else all but the last."""
        sizes = dim_sizes(self.config.model)
        dims = weight.dims.removeprefix('L')
        inputs, outputs = (dims[:1], dims[1:]) if dims[0] == 'D' else (dims[:-1], dims[-1:])
        n, k = (
            prod(sizes[letter.upper()] for letter in group)
            // prod(self.shards.get(letter, 1) for letter in group)
            for group in (outputs, inputs)
        )
        return n, k
