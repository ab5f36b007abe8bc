"""The vision encoder: whole weights on every device, and images sharded over `data` and `model`.

A device encodes its own images, so no layer communicates. Names use the letters of the encoder's
own dims, which no mesh axis shards: E is the D of the model, W the width of a unit's merged
patches, V the vectors of an image, Q frames, and A DeepStack's taps.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.config import ModelConfig, VisionConfig
from megajax.core.config.model import encoder_layers
from megajax.core.model.activation import activate
from megajax.core.model.arr_coc.texture import patch_places, texture
from megajax.core.model.block import Block
from megajax.core.model.computation import Computation
from megajax.core.model.linear import add_bias
from megajax.core.model.norm import make_norm
from megajax.core.model.parameters import Parameters
from megajax.core.model.product import product
from megajax.core.model.rows import Rows
from megajax.core.model.stack import run_layer, run_layers


class Encoder(nnx.Module):
    """Qwen3-VL's encoder (2025): a vision transformer with 2-D rotary positions and mergers."""

    def __init__(self, model: ModelConfig, *, key: jax.Array):
        assert model.vision is not None
        self.config, blocks = model.vision, encoder_layers(model.vision)
        # Whether the layers are separate instructions, which XLA can overlap with collectives. A
        # loop is a single instruction.
        self.is_unrolled = False
        parameters = Parameters.of_encoder(model)
        patch_key, position_key, layers_key, merger_key, deep_key = jax.random.split(key, 5)
        self.patch = PatchEmbedding(parameters['patch'], key=patch_key)
        self.position = PatchPosition(parameters['position'], self.config, key=position_key)
        self.layers = jax.vmap(lambda key: Block(blocks, parameters['layers'], key=key))(
            jax.random.split(layers_key, blocks.num_layers)
        )
        self.merger = Merger(self.config, parameters['merger'], 'D', key=merger_key)
        taps = len(self.config.deepstack)
        self.deep_mergers = (
            jax.vmap(lambda key: Merger(self.config, parameters['deep_mergers'], 'W', key=key))(
                jax.random.split(deep_key, taps)
            )
            if taps
            else None
        )

    def __call__(
        self,
        numbers_IPX: jax.Array,
        grid_I2: jax.Array,
        place_IP2: jax.Array,
        segment_IP: jax.Array,
        *,
        recompute: str = 'none',
    ) -> jax.Array:
        """Return the vectors [I, V, 1 + taps, E] of images; vectors of empty slots mean nothing.

        `grid_I2` has the rows and columns of patches of each image, `place_IP2` the row and column
        of each patch; attention stays within a segment.
        """
        dtype = numbers_IPX.dtype
        with jax.named_scope('patch'):
            x_IPD = self.patch(numbers_IPX)
            x_IPD = (x_IPD.astype(jnp.float32) + self.position(place_IP2, grid_I2)).astype(dtype)
        x_IPD, tapped = self._run_layers(x_IPD, place_IP2, segment_IP, recompute)
        with jax.named_scope('merger'):
            vectors = [self.merger(x_IPD)[None]]
            if self.deep_mergers is not None:
                vectors.append(
                    jax.vmap(lambda merger, x: merger(x))(self.deep_mergers, jnp.stack(tapped))
                )
            return jnp.moveaxis(jnp.concatenate(vectors), 0, 2)

    def _run_layers(
        self, x_IPD: jax.Array, place_IP2: jax.Array, segment_IP: jax.Array, recompute: str
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the output of the last layer, and of the layers that DeepStack taps."""
        taps = self.config.deepstack
        rows, computation = Rows(place_IP2, segment_IP), Computation(recompute=recompute)

        def layer(
            block: Block, _: Block | None, carry: tuple[jax.Array, ...], index: jax.Array
        ) -> tuple[jax.Array, ...]:
            x_IPD, *tapped = carry
            x_IPD = run_layer(block, x_IPD, rows, index, computation)
            # One condition per tap: XLA would save a single condition for all taps with the shape
            # of their arrays.
            chosen = (
                lax.select_n(index == tap, old, x_IPD)
                for tap, old in zip(taps, tapped, strict=True)
            )
            return x_IPD, *chosen

        # Zeros made from the image, so that they are mapped like it.
        carry = (x_IPD, *(0 * x_IPD for _ in taps))
        with jax.named_scope('layers'):
            x_IPD, *tapped = run_layers(
                layer, carry, self.layers, recompute=recompute, unroll=self.is_unrolled
            )
        return x_IPD, tapped


class PatchEmbedding(nnx.Module):
    """One matmul for all patches: a convolution whose stride equals its kernel size."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        self.shape = tuple(parameters.sizes[letter] for letter in 'YQX')
        self.weight = parameters.make('weight', key)
        self.bias = parameters.make('bias')

    def __call__(self, x_IPX: jax.Array) -> jax.Array:
        """Return x_IPD, computed from each patch's pixels; all frames are the same image."""
        channels, _, size = self.shape
        shape = *x_IPX.shape[:2], channels, size
        x_IPYX = x_IPX.reshape(shape, out_sharding=self.layout('IPYX'))
        x_IPYQX = jnp.broadcast_to(x_IPYX[:, :, :, None], (*x_IPX.shape[:2], *self.shape))
        x_IPD = product('IPYQX,YQXD->IPD', x_IPYQX, self.weight, self.layout, x_IPX.dtype)
        return add_bias(x_IPD, jnp.expand_dims(self.bias[...], (0, 1)))


class PatchPosition(nnx.Module):
    """A learned vector for each cell of a square grid, interpolated to the grid of an image.

    Its initial value is the sum of a row vector and a column vector, so that what is learned about
    a column in one row holds in all rows.
    """

    def __init__(self, parameters: Parameters, config: VisionConfig, *, key: jax.Array):
        self.side, self.layout = config.positions, parameters.layout
        self.table = parameters.make('table', key)
        table = self.table[...].reshape(self.side, self.side, -1)
        table = (table[:, :1] + table[:1]) / math.sqrt(2)
        self.table[...] = table.reshape(self.table.shape)

    def __call__(self, place_IP2: jax.Array, grid_I2: jax.Array) -> jax.Array:
        """Return the vectors [I, P, D] in fp32, bilinear between the four nearest cells."""
        last = jnp.maximum(grid_I2 - 1, 1)
        at_IP2 = place_IP2 * ((self.side - 1) / last.astype(jnp.float32))[:, None]
        side = jnp.expand_dims(jnp.arange(self.side), (0, 1, 2))
        near_IP2S = jnp.maximum(1 - jnp.abs(at_IP2[..., None] - side), 0)
        share_IPSS = near_IP2S[:, :, 0, :, None] * near_IP2S[:, :, 1, None, :]
        shape = *share_IPSS.shape[:2], self.side**2
        share_IPS = share_IPSS.reshape(shape, out_sharding=self.layout('IPS'))
        return jnp.einsum('ips,sd->ipd', share_IPS, self.table[...])


class Merger(nnx.Module):
    """Two layers that turn a unit of patches into a vector; `norm` is the dim that is normed."""

    def __init__(self, config: VisionConfig, parameters: Parameters, norm: str, *, key: jax.Array):
        self.unit, self.norm_dim, self.layout = config.unit, norm, parameters.layout
        up_key, down_key = jax.random.split(key)
        self.norm = make_norm(encoder_layers(config), parameters['norm'], f'P{norm}')
        self.up = Linear('IVW,Ww->IVw', parameters['up'], key=up_key)
        self.down = Linear('IVW,WE->IVE', parameters['down'], key=down_key)

    def __call__(self, x_IPD: jax.Array) -> jax.Array:
        """Return the vectors [I, V, E] of the units of an image."""
        images, patches, size = x_IPD.shape
        x_IPD = self.norm(x_IPD) if self.norm_dim == 'D' else x_IPD
        shape = images, patches // self.unit, self.unit * size
        x_IVW = x_IPD.reshape(shape, out_sharding=self.layout('IVW'))
        x_IVW = self.norm(x_IVW) if self.norm_dim == 'W' else x_IVW
        return self.down(activate(self.up(x_IVW), 'gelu'))


class Linear(nnx.Module):
    """A matmul with an unsharded weight, and a bias; `equation` has the dims of both."""

    def __init__(self, equation: str, parameters: Parameters, *, key: jax.Array):
        self.equation, self.layout = equation, parameters.layout
        self.weight = parameters.make('weight', key)
        self.bias = parameters.make('bias')

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the result in the dtype of x."""
        y = product(self.equation, x, self.weight, self.layout, x.dtype)
        return add_bias(y, jnp.expand_dims(self.bias[...], (0, 1)))


def numbers_of(pixel_IPX: jax.Array, grid_I2: jax.Array, config: VisionConfig) -> jax.Array:
    """Return the encoder's input, the bytes of each patch scaled to -1 to 1, in fp32."""
    if config.channels == 'rgb':
        return pixel_IPX.astype(jnp.float32) / 127.5 - 1
    of_image = partial(texture, patch_size=config.patch_size, merge_size=config.merge_size)
    return 2 * jax.vmap(of_image)(pixel_IPX, grid_I2) - 1


def places(grid_I2: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Return row and column [I, P, 2] of each patch, and 1 if it is part of the image, else 0.

    The patches of a unit are neighbors; units are in raster order.
    """
    count = config.max_patches
    of_image = partial(patch_places, count=count, merge_size=config.merge_size)
    place_IP2 = jnp.stack(jax.vmap(of_image)(grid_I2), -1)
    is_part_IP = jnp.arange(count)[None] < grid_I2[:, :1] * grid_I2[:, 1:]
    return place_IP2, is_part_IP.astype(jnp.int32)
