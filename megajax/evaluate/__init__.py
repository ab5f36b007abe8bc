"""Evaluation on unseen text: perplexity, and the two evaluations of the Megatron paper."""

from megajax.evaluate.lambada import lambada
from megajax.evaluate.perplexity import perplexity, wikitext
from megajax.evaluate.score import Scorer, Window

__all__ = ['Scorer', 'Window', 'lambada', 'perplexity', 'wikitext']
