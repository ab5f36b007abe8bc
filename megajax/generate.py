"""Text from a model, sampled one token at a time. B batch, S sequence, D model, V vocabulary."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from jax import lax

from megajax.config import Config
from megajax.data import Tokenizer
from megajax.model.decoder import model_graph
from megajax.model.loss import Loss
from megajax.parallel import layout

Sample = Callable[[nnx.State, np.ndarray, int, int, float, jax.Array], jax.Array]


def generate(
    config: Config,
    params: nnx.State,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt, read as the start of a document, by `max_tokens` tokens or to the end of the document.

    The same text on every mesh. Prompt and text share `max_seq_len` positions; of a longer prompt the end is read.
    """
    length = config.model.max_seq_len
    sample = make_sample(config)
    texts = []
    for index, encoded in enumerate(tokenizer.encode_batch(list(prompts))):
        prompt = [tokenizer.eod, *encoded][-max(length - max_tokens, 1) :]
        token_BS = np.zeros((1, length), np.int32)
        token_BS[0, : len(prompt)] = prompt
        end = min(len(prompt) + max_tokens, length)
        key = jax.random.fold_in(jax.random.key(seed), index)
        made = np.asarray(sample(params, token_BS, len(prompt), end, temperature, key))[0, len(prompt) : end].tolist()
        texts.append(tokenizer.decode(made[: made.index(tokenizer.eod)] if tokenizer.eod in made else made))
    return texts


def make_sample(config: Config) -> Sample:
    """`sample(params, token_BS, start, end, temperature, key)`: token_BS with the positions start to end filled in."""
    loss, graph = Loss.of(config), model_graph(config)

    @jax.jit
    def sample(params: nnx.State, token_BS: jax.Array, start: int, end: int, temperature: float, key: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)

        def fill(position: jax.Array, token_BS: jax.Array) -> jax.Array:
            x_BSD = model.hidden(token_BS)
            x_BSD = jax.reshard(x_BSD, model.layout.full_BSD(x_BSD))
            x_B1D = lax.dynamic_slice_in_dim(x_BSD, position - 1, 1, axis=1)
            logits_B1V = jax.reshard(loss.logits(x_B1D, model.head_VD.T), layout.replicated(x_B1D))
            token_B1 = jax.random.categorical(jax.random.fold_in(key, position), logits_B1V / temperature)
            return lax.dynamic_update_slice_in_dim(token_BS, token_B1.astype(token_BS.dtype), position, axis=1)

        return lax.fori_loop(start, end, fill, jax.reshard(token_BS, layout.replicated(token_BS)))

    return sample
