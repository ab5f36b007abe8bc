"""Every matmul of a training step, by its sizes on one device.

The list follows from the declared parameters and their layout. FLOPs (`flops.py`), the time of a
step (`analysis/plan/time.py`) and what `inspect` expects in a compiled program follow from the
list.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction

from megajax.core.config.model import ModelConfig, encoder_layers
from megajax.core.config.schema import Config
from megajax.core.config.vision import Part
from megajax.core.counts.declaration import OF_LAYERS, Parameter
from megajax.core.counts.expert_rows import rows_of_experts
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.layers import num_in_stack
from megajax.core.counts.parameters import declare, dim_sizes, elements, parameters
from megajax.core.counts.product import DENSE, Phase, Product, Where, product_and_gradients
from megajax.core.counts.relevance import level_products, network_products
from megajax.core.counts.runs import Runs
from megajax.core.counts.vision import runs_backward
from megajax.core.counts.windows import block_in_chunk, keys_read, windows, windows_within
from megajax.core.parallel.layout import Layout
from megajax.xla.hlo.products import keys_in_window


def products(
    config: Config, *, flash: bool, layout: Layout | None = None, recomputes_last: bool = False
) -> list[Product]:
    """Return the matmuls of a step on one device of `layout`, by default the layout of `config`.

    The backward pass of a matmul is two matmuls with as many FLOPs each: the gradients of its input
    and of its weight. Full recomputation omits a layer's last matmul, because the backward pass
    does not need it, unless `recomputes_last` is set, a norm reads the result, or a stage
    recomputes several layers at once. Pipeline stages also compute in their idle ticks.
    """
    layout = layout or Layout.of(config)
    rows = config.train.batch_size // (layout.num_shards('B') * config.train.microbatches)
    runs = Runs.of_stages(config, layout)
    counted = _Counted(config, layout.shards, rows, runs.layers)
    # several layers in a tick
    has_several = layout.num_shards('L') > 1 and runs.layers > runs.embedding
    recomputes_last |= config.overlap.repeats_outputs or has_several
    every = [
        *counted.layers(recomputes_last=recomputes_last),
        *counted.attention(flash=flash),
        *counted.heads(),
        *_of_encoder(config, rows, layout, flash=flash, recomputes_last=recomputes_last),
        *_of_cross_attention(config, rows, layout),
        *_of_relevance(config, rows, layout),
    ]
    # `_Counted` has left out the gradients of the decoder's frozen weights.
    return [x for x in every if _is_needed(x, config)] if config.model.frozen_image_parts else every


def _is_needed(product: Product, config: Config) -> bool:
    """Whether a step with frozen parts computes a matmul.

    A frozen weight has no gradient, and the backward pass ends where nothing before it is trained.
    """
    if product.phase == 'forward':
        return True
    freeze = config.model.frozen_image_parts
    part: Part = 'decoder'
    if product.name.startswith('vision '):
        part = 'merger' if product.name.startswith('vision merger') else 'encoder'
    if product.name.endswith(' weight') and part != 'decoder':
        return part not in freeze
    if product.name in ('cross key_value input', 'cross key_value A input'):  # of the vectors
        part = 'merger'
    if part == 'decoder' or runs_backward(config):
        return True
    return part == 'merger' and 'merger' not in freeze  # the merger's norm is learned, too


def _of_encoder(
    config: Config, rows: int, layout: Layout, *, flash: bool, recomputes_last: bool
) -> Iterator[Product]:
    """Yield the matmuls of a vision encoder for the images that a device encodes."""
    vision, runs = config.vision, config.train.microbatches
    if vision is None:
        return
    blocks, images = encoder_layers(vision), -(-rows * vision.images // layout.num_shards('I'))
    train = config.train.model_copy(update={'seq_len': vision.read_patches})
    others = {'vision': None, 'lora': None}
    alike = config.model_copy(update={'model': blocks, 'train': train, **others})
    counted = _Counted(alike, {}, images, Runs.of_megatron(config).encoder)
    flash = flash and uses_flash(alike)
    layers = counted.layers(recomputes_last=recomputes_last), counted.attention(flash=flash)
    for product in itertools.chain(*layers):
        yield dataclasses.replace(product, name=f'vision {product.name}')
    D, W, patches = vision.hidden_size, vision.merged_size, images * vision.read_patches
    mergers = (1 + len(vision.deepstack)) * runs
    # The pixels of an image and their positions have no gradient.
    first = (
        ('patch', D, vision.frames * vision.num_channels * vision.patch_size**2),
        ('position', D, vision.positions**2),
    )
    for name, n, k in first:
        # With relevance, patches are multiplied by gates, which have a gradient.
        of_input = name == 'patch' and config.relevance is not None
        yield from product_and_gradients(f'vision {name}', patches, n, k, runs, of_input=of_input)
    for name, n, k in (('merger up', W, W), ('merger down', config.model.hidden_size, W)):
        units = images * vision.vectors
        yield from product_and_gradients(f'vision {name}', units, n, k, mergers)


def _of_cross_attention(config: Config, rows: int, layout: Layout) -> Iterator[Product]:
    """Yield the matmuls of the layers that attend to images.

    Recomputation repeats the last matmul of a layer, because the gate's gradient needs its result.
    """
    vision, runs = config.vision, Runs.of_stages(config, layout)
    if vision is None or not runs.cross:
        return
    counted = _Counted(config, layout.shards, rows, runs.cross)
    for product in counted.layers(recomputes_last=True, stack='J'):
        yield dataclasses.replace(product, name=f'cross {product.name}')
    shards = layout.num_shards('I')
    vectors = -(-rows * vision.images // shards) * shards * vision.vectors
    for name, weight in parameters(config.model):
        if name.startswith('cross.key_value.'):
            label = f'cross {_product_name(name)}'
            yield from counted.with_weight(label, 'layers', weight, vectors, runs.embedding)
    keys = vision.images * vision.vectors
    for product in counted.attention(flash=False, keys=keys):
        yield dataclasses.replace(product, name=f'cross {product.name}')


def _of_relevance(config: Config, rows: int, layout: Layout) -> Iterator[Product]:
    """Yield the matmuls of relevance: regions at their levels, and small networks."""
    vision, runs = config.vision, config.train.microbatches
    if config.relevance is None or vision is None:
        return
    shards = layout.num_shards('I')
    for batch, sizes in level_products(config, -(-rows * vision.images // shards)):
        yield Product(
            name='relevance means',
            where='layers',
            phase='forward',
            sizes=sizes,
            batch=batch,
            times=runs,
        )
    for name, m, n, k, learns in network_products(config, rows * vision.images, shards):
        yield from product_and_gradients(f'relevance {name}', m, n, k, runs, of_input=learns)


@functools.cache
def _weights(model: ModelConfig, stacks: str) -> tuple[tuple[tuple[str, Parameter], ...], set[str]]:
    """Return the weights of layers by their matmuls' names, and the names of the last matmuls."""
    weights = tuple(
        (DENSE * (parameter.dims[0] == 'Δ') + _product_name(name), parameter)
        for name, parameter in parameters(model)
        if parameter.dims[0] in stacks and parameter.is_multiplied
    )
    last = {x.dims[0]: name for name, x in weights if x.is_matrix}
    if len(last) > 1:  # attention's stack does not contain a layer's last matmul
        del last['L']
    return weights, {*last.values()}


def _product_name(parameter: str) -> str:
    """Return the name of the matmul with a parameter: its linear layer's name, such as `qkv`.

    `layers.attention.qkv.adapter.A` gives `qkv A`.
    """
    *_, module, kind = parameter.split('.')
    return module if kind == 'weight' else f'{parameter.split(".")[-3]} {kind}'


@dataclasses.dataclass(frozen=True)
class _Counted:
    config: Config
    shards: Mapping[str, int]
    rows: int  # sequences of a microbatch on a data shard
    runs: int  # runs of one layer in a pass, over all layers of a device and the whole step

    @property
    def length(self) -> int:
        """The tokens of a sequence on a context shard."""
        return self.config.train.seq_len // self.shards.get('S', 1)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def layers(self, *, recomputes_last: bool, stack: str = 'LΔΛ') -> Iterator[Product]:
        """Yield the matmuls with the weights of the layers whose first dim is in `stack`."""
        train, model = self.config.train, self.config.model
        weights, last = _weights(model, stack)
        for name, parameter in weights:
            batch, rows = self._rows(parameter)
            dim = parameter.dims[0]
            times = num_in_stack(model, dim, self.runs) if dim in 'ΔΛ' else self.runs
            yield from self.with_weight(name, 'layers', parameter, rows, times, batch)
            is_last = name.removesuffix(' B') in last
            # The gradient of the weights with which a token's experts are added needs the last
            # matmul.
            is_read = recomputes_last or parameter.is_of_experts
            if train.recompute == 'full' and (not is_last or is_read):
                yield Product(
                    name=name,
                    where='layers',
                    phase='recompute',
                    sizes=(rows, *self._output_and_input(parameter)),
                    batch=batch,
                    times=times,
                    of_experts=parameter.is_of_experts,
                )

    def _rows(self, weight: Parameter) -> tuple[int, int]:
        """Return the number of matmuls with a weight of the layers, and the rows of each."""
        if not weight.is_of_experts:
            return 1, self.tokens
        return rows_of_experts(self.config, self.tokens, self.shards)

    def attention(self, *, flash: bool, keys: int | None = None) -> Iterator[Product]:
        """Yield the matmuls of the attention core, with a sequence's own keys, or with `keys` keys.

        The forward pass has two matmuls of equal FLOPs, with keys and with values, and the backward
        pass has four. With a flash kernel the backward pass also computes the scores again.
        """
        model, train = self.config.model, self.config.train
        rows = self.rows * self.shards.get('B', 1) // self.shards.get('R', 1)
        heads = rows * model.num_heads // self.shards.get('N', 1)
        counts: dict[Phase, int] = {'forward': 2, 'backward': 5 if flash else 4, 'recompute': 0}
        if train.recompute == 'full' or (train.recompute == 'selective' and not flash):
            counts['recompute'] = 2 if train.recompute == 'full' else 1
        if 'S' in self.shards:
            yield from self._attention_across(heads, counts['recompute'] // 2 * 2, flash=flash)
            return
        for window, share in windows(model).items() if keys is None else ((None, 1),):
            read = keys or keys_read(
                window, self.length, flash=flash, dropout=model.attention_dropout
            )
            for phase, count in counts.items():
                times = count * share
                yield self._attention(phase, heads, self.length, times, flash=flash, keys=read)

    def _attention_across(self, heads: int, recomputed: int, *, flash: bool) -> Iterator[Product]:
        """Yield the matmuls of attention across context shards, which saves no scores.

        The first block is a shard's own tokens. For each other shard, causal attention has two
        blocks, each with half of the queries and half of the keys; bidirectional attention has one
        block with all of them. With a window, there are several blocks of a shard's own tokens, and
        each has a halo of earlier keys for its first queries. An exchange of heads leaves one
        block, of all tokens with a part of the heads.
        """
        others, half = self.shards['S'] - 1, self.length // 2
        # If recomputation and backward pass are in one loop, XLA computes the scores of the first
        # block once for both.
        is_shared = recomputed and not flash and 'L' not in self.shards
        counts: dict[Phase, int] = {'forward': 2, 'backward': 5, 'recompute': recomputed}
        kinds = windows_within(self.config).items()
        for (window, share), (phase, count) in itertools.product(kinds, counts.items()):
            own = (count - 1 if is_shared and phase == 'backward' else count) * share
            if self.config.mesh.exchanges_heads:
                whole = self.length * self.shards['S']
                read = keys_in_window(window, whole) if window and flash else whole
                of_shard = heads // self.shards['S']
                yield self._attention(phase, of_shard, whole, own, flash=flash, keys=read)
                continue
            if window is None:
                yield self._attention(phase, heads, self.length, own, flash=flash)
                times, is_causal = others * count * share, self.config.model.causal
                rows, length = (2 * heads, half) if is_causal else (heads, self.length)
                yield self._attention(phase, rows, length, times, flash=flash, is_causal=False)
                continue
            block = block_in_chunk(window, half, flash=flash)
            blocks = heads * self.length // block
            read = keys_in_window(window, block) if flash else block
            yield self._attention(phase, blocks, block, own, flash=flash, keys=read)
            yield self._attention(phase, blocks, window, own, flash=flash)

    def _attention(
        self,
        phase: Phase,
        heads: int,
        length: int,
        count: int | Fraction,
        *,
        flash: bool,
        keys: int | None = None,
        is_causal: bool = True,
    ) -> Product:
        """Return `count` matmuls of `length` queries with `keys` keys, by default `length` too."""
        return Product(
            name='attention',
            where='attention',
            phase=phase,
            sizes=(length, keys or length, self.config.model.head_dim),
            batch=heads,
            times=int(count * self.runs),
            flash=flash,
            is_causal=is_causal and self.config.model.causal,
        )

    def heads(self) -> Iterator[Product]:
        """Yield the matmuls of the heads.

        These are the logits of every token and, for BERT, a dense layer of every token and two
        matmuls of each sequence's first token. Sequence parallelism shards the dense layer; every
        device computes the last two. Pipeline stages divide the tokens of each sequence shard
        equally.
        """
        declared = declare(self.config.model)
        runs, embedding = self.config.train.microbatches, declared['embedding']
        assert not isinstance(embedding, Parameter)
        table = declared.get('head') or embedding['table']
        assert isinstance(table, Parameter)
        shards = self.shards.get('T', 1)
        tokens = -(-self.tokens // (shards * self.shards.get('L', 1)))
        yield from self.with_weight('head', 'head', table, shards * tokens, runs)
        for name, parameter in parameters(self.config.model):
            is_head = parameter.is_matrix and parameter.owner == 'decoder'
            if is_head and not {*OF_LAYERS, 'V'} & {*parameter.dims}:
                rows = tokens if parameter.summed else self.rows
                label = name.split('.')[-2]
                yield from self.with_weight(label, 'head', parameter, rows, runs)

    def with_weight(
        self, name: str, where: Where, weight: Parameter, rows: int, times: int, batch: int = 1
    ) -> Iterator[Product]:
        """Yield the matmul of `rows` rows with a weight, and its gradients.

        A frozen weight has no gradient.
        """
        n, k = self._output_and_input(weight)
        yield from product_and_gradients(
            name,
            rows,
            n,
            k,
            times,
            where=where,
            of_weight=not weight.is_frozen,
            batch=batch,
            of_experts=weight.is_of_experts,
        )

    def _output_and_input(self, weight: Parameter) -> tuple[int, int]:
        """Return the output size and the input size of a weight, or an expert's, on a device."""
        sizes, outputs = dim_sizes(self.config.model), weight.outputs.replace('X', '')
        n, k = (elements(dims, sizes, self.shards) for dims in (outputs, weight.inputs))
        return n, k
