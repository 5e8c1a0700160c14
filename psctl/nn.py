"""Modules for models with sparse parameters: `from psctl.nn import SparseEmbedding`."""

from __future__ import annotations

from psctl.sparse.embedding_modules import SparseEmbedding as SparseEmbedding
from psctl.sparse.embedding_modules import SparseEmbeddingBag as SparseEmbeddingBag

__all__ = ["SparseEmbedding", "SparseEmbeddingBag"]
