"""Corpora: from files of text to files of tokens."""
