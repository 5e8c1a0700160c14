"""Gradients in fewer bytes.

codecs: codes values in 16, 8 or 1 bits
error_feedback: a shard's gradients as a code, and the residual that is kept
sparsification: which elements of a gradient are sent
"""
