"""Build corpora: convert text files to token files."""
