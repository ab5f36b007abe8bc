"""Execute the output of XLA's GPU compiler on simulated CPU devices, without a GPU.

The compiled program's text is translated, instruction by instruction, into an equivalent program
for XLA's CPU compiler. A call to cuBLAS or cuDNN becomes the computation that the library's
documentation specifies. An instruction without a translation is an error. This package does not
depend on megajax's own step.
"""
