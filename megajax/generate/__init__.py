"""Text generation with a KV cache that is sharded over `model`, as attention is."""

from megajax.generate.continuation import Continuation
from megajax.generate.generator import Generator, Request, encode_prompts, generate
from megajax.generate.image_prompts import PromptImages, prompt_of, read_prompt
from megajax.generate.sampling import Sampling

__all__ = [
    'Continuation',
    'Generator',
    'PromptImages',
    'Request',
    'Sampling',
    'encode_prompts',
    'generate',
    'prompt_of',
    'read_prompt',
]
