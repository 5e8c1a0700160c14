"""Gradients in fewer bytes.

codecs: values in 16, 8 or 1 bits
error_feedback: encodes a shard's gradients and keeps the residual
sparsification: selects the elements of a gradient that are sent
"""
