"""Text corpora, tokenizers, and the split into training, validation and test."""
