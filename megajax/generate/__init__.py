"""Text generation with a KV cache that is sharded over `model`, as attention is."""

from megajax.generate.continuation import Continuation
from megajax.generate.generator import Generator, Request, encode_prompts, generate
from megajax.generate.sampling import Sampling

__all__ = ['Continuation', 'Generator', 'Request', 'Sampling', 'encode_prompts', 'generate']
