"""Text generation with a KV cache that is sharded over `model`, like attention."""

from megajax.runtime.generate.continuation import Continuation
from megajax.runtime.generate.generator import Generator, Request, encode_prompts, generate
from megajax.runtime.generate.image_folder import answer_all, check_prompts, find_pictures
from megajax.runtime.generate.image_prompts import PromptImages, PromptReader, prompt_of
from megajax.runtime.generate.sampling import Sampling

__all__ = [
    'Continuation',
    'Generator',
    'PromptImages',
    'PromptReader',
    'Request',
    'Sampling',
    'answer_all',
    'check_prompts',
    'encode_prompts',
    'find_pictures',
    'generate',
    'prompt_of',
]
