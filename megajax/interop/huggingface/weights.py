"""Convert the weights of Hugging Face families, using their tables of tensors."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
from flax import nnx

from megajax.core.config import Config, ConfigError, ModelConfig
from megajax.core.counts.layers import layers_of
from megajax.core.parallel.layer_order import tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.interop.huggingface.families import FAMILIES
from megajax.interop.huggingface.family import Family
from megajax.interop.pieces import (
    Piece,
    Pieces,
    Shape,
    check,
    check_finite,
    dims_here,
    make_pieces,
    place,
    shapes_of,
    tensors_of,
    with_pairs,
)
from megajax.runtime.checkpoint.open import abstract_params

LAYER = re.compile(r'\.(\d+)\.')  # the index of a layer in the name of a tensor


def huggingface_pieces(
    model: ModelConfig, shapes: Mapping[str, Shape], *, family: str | None = None
) -> Pieces:
    """Return each parameter's pieces in a family's tensors, which omit the vocabulary's padding.

    `family` defaults to GPT-2, Llama, MegatronBert or Qwen3-VL, depending on the model.
    """
    chosen = _family(model, family)
    dims, vocab = dims_here(model), slice(0, model.vocab_size)

    def pieces_of(path: str, shape: Shape) -> list[Piece]:
        pieces_of_tensors = list[list[Piece]]()
        for there in tensors_of(chosen.tensors, path, chosen.name):
            ranges = {'C': there.columns, 'U': there.columns, 'V': vocab}
            layers = layers_of(model, dims[path][0]) if dims[path][0] in 'ΔΛ' else None
            pieces = make_pieces(there.name, there.dims, dims[path], shape, ranges, layers=layers)
            if there.in_pairs:
                pieces = with_pairs(pieces, dims[path], model)
            pieces_of_tensors.append([*map(_with_square, pieces)] if there.is_square else pieces)
        # Layer by layer, so that the pieces of a joined tensor are next to each other.
        return [piece for of_layer in zip(*pieces_of_tensors, strict=True) for piece in of_layer]

    return {path: pieces_of(path, shape) for path, shape in shapes.items()}


def _with_square(piece: Piece) -> Piece:
    """Return a piece whose last dim is two equal dims in the other format."""
    *outer, last = piece.shape
    return piece._replace(shape=(*outer, math.isqrt(last), math.isqrt(last)))


def _family(model: ModelConfig, name: str | None) -> Family:
    if name is None and model.is_bert:
        name = 'megatron-bert'
    if name is None and model.vision is not None:
        name = 'qwen3_vl'
    return FAMILIES[name or ('gpt2' if model.position == 'learned' else 'llama')]


def from_huggingface(
    config: Config, tensors: Mapping[str, np.ndarray], *, source: str, family: str | None = None
) -> nnx.State:
    """Return a family's tensors as parameters in fp32.

    The parameters have their stored sharding on the current mesh. The vocabulary is padded with
    zeros. Memory-mapped `tensors` are read once, and each process reads only what its devices need.
    Raises a ConfigError that names `source` for tensors that do not fit the model. `family`
    defaults to GPT-2, Llama, MegatronBert or Qwen3-VL, depending on the model.
    """
    abstract = abstract_params(config)
    pieces = huggingface_pieces(config.model, shapes_of(config.model), family=family)
    tensors = tensors_of_pieces(config.model, pieces, tensors, source=source, family=family)
    check(abstract, pieces, tensors, of=source, keys='config.json decides which tensors exist')
    params = place(abstract, pieces, tensors, of=source)
    return tree_on_stages(params, Layout.of(config))


def tensors_of_pieces(
    model: ModelConfig,
    pieces: Pieces,
    tensors: Mapping[str, np.ndarray],
    *,
    source: str,
    family: str | None = None,
) -> dict[str, np.ndarray]:
    """Return a directory's tensors by the names of the pieces, as views; others keep their names.

    Raises a ConfigError that names `source` for a joined tensor that is missing or has the wrong
    shape, and for tied tensors that differ.
    """
    chosen = _family(model, family)
    named = _named_as_saved(model, chosen, tensors, source)
    for name, parts in joined_tensors(pieces, chosen).items():
        if len(parts) > 1:
            named |= _split(name, parts, named, source)
    return named


def joined_tensors(pieces: Pieces, family: Family | str) -> dict[str, list[Piece]]:
    """Return the pieces that each tensor of a directory contains, one below the other, in order."""
    family = FAMILIES[family] if isinstance(family, str) else family
    whole = {part: name for name, parts in family.joined.items() for part in parts}
    tensors = defaultdict[str, list[Piece]](list)
    for piece in (piece for group in pieces.values() for piece in group):
        template = LAYER.sub('.{}.', piece.name, count=1)
        number = LAYER.search(piece.name)
        name = whole[template].format(number[1]) if number and template in whole else piece.name
        tensors[name].append(piece)
    return dict(tensors)


def full_names(family: Family | str, names: Collection[str]) -> dict[str, str]:
    """Return each name of a directory's tensors with the prefix that some directories omit."""
    family = FAMILIES[family] if isinstance(family, str) else family
    prefix = '' if any(name.startswith(family.prefix) for name in names) else family.prefix
    return {name: name if name in family.copies else prefix + name for name in names}


def _split(
    name: str, parts: list[Piece], tensors: dict[str, np.ndarray], source: str
) -> dict[str, np.ndarray]:
    """Take a joined tensor out of `tensors`, and return its parts as views by their names."""
    rows = [piece.shape[0] for piece in parts]
    if name not in tensors:
        raise ConfigError(f'{source}: missing tensors: {name}')
    x = tensors.pop(name)
    if x.shape[:1] != (sum(rows),):
        expected = sum(rows), *parts[0].shape[1:]
        raise ConfigError(f'{source}: {name}: expected {expected}, got {x.shape}')
    cuts = np.split(x, np.cumsum(rows)[:-1])
    return {piece.name: part for piece, part in zip(parts, cuts, strict=True)}


def _layer_number(name: str) -> int:
    """Return the layer index in a tensor's name; -1 if there is none."""
    number = LAYER.search(name)
    return int(number[1]) if number else -1


def _named_as_saved(
    model: ModelConfig, family: Family, tensors: Mapping[str, np.ndarray], source: str
) -> dict[str, np.ndarray]:
    """Return the tensors under the names that `save_pretrained` of the full model uses.

    Unused buffers, layers for multi-token prediction, and copies of tied tensors are dropped.
    """
    for unpack in family.packings.values():
        tensors = unpack(tensors, source)
    full = full_names(family, tensors)
    named = {
        full[name]: x
        for name, x in tensors.items()
        if not (family.buffers and family.buffers.fullmatch(name))
        and not (family.has_more_layers and _layer_number(name) >= model.num_layers)
    }
    for copy in family.copies.keys() & named.keys() if model.tie_embeddings else ():
        original = family.copies[copy]
        name, x = next(
            ((name, x) for name, x in named.items() if name.endswith(original)), ('', None)
        )
        if x is not None and not np.array_equal(named[copy], x):
            check_finite(name, x, of=source)  # otherwise NaN would differ even from itself
            raise ConfigError(
                f'{source}: {copy} differs from {name}, but tie_word_embeddings says they are tied'
            )
        del named[copy]
    return named
