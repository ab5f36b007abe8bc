"""The program that XLA's GPU compiler made, executed on simulated CPU devices with no GPU there.

Its text is translated instruction by instruction into one that XLA's CPU compiler takes and that
computes the same; a call of cuBLAS or cuDNN becomes what the library's documentation says it
computes. What has no translation is an error. Knows nothing of megajax's own step.
"""
