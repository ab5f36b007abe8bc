"""Evaluation on held-out text: perplexity, and the two evaluations of the Megatron paper."""

from megajax.runtime.evaluate.documents import are_documents, document_perplexity
from megajax.runtime.evaluate.lambada import lambada
from megajax.runtime.evaluate.perplexity import perplexity, wikitext
from megajax.runtime.evaluate.score import Scorer, Window

__all__ = [
    'Scorer',
    'Window',
    'are_documents',
    'document_perplexity',
    'lambada',
    'perplexity',
    'wikitext',
]
