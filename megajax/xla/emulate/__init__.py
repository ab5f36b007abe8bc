"""The output of XLA's GPU compiler, executed on simulated CPU devices without a GPU.

The compiled program's text is translated, instruction by instruction, into text for XLA's CPU
compiler that computes the same. A call of cuBLAS or cuDNN becomes the computation that the
library's documentation specifies. An instruction without a translation is an error. This package
knows nothing of megajax's own step.
"""
