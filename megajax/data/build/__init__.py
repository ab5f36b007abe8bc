"""Build token files from corpora: `megajax data build`."""
