"""Evaluation on unseen text: perplexity, and the two evaluations of the Megatron paper."""

from megajax.evaluate.documents import are_documents, document_perplexity
from megajax.evaluate.lambada import lambada
from megajax.evaluate.perplexity import perplexity, wikitext
from megajax.evaluate.score import Scorer, Window

__all__ = [
    'Scorer',
    'Window',
    'are_documents',
    'document_perplexity',
    'lambada',
    'perplexity',
    'wikitext',
]
