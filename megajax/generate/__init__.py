"""Text generation with a KV cache that is sharded over `model`, as attention is."""

from megajax.generate.continuation import Continuation
from megajax.generate.generator import Generator, PromptImages, Request, encode_prompts, generate
from megajax.generate.sampling import Sampling

__all__ = [
    'Continuation',
    'Generator',
    'PromptImages',
    'Request',
    'Sampling',
    'encode_prompts',
    'generate',
]
