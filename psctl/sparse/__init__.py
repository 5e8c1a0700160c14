"""Embeddings whose rows are in a store on the job's servers: `psctl.nn`.

embedding_modules: SparseEmbedding and SparseEmbeddingBag, the modules of a script
embedding_rows: the rows of one module: its store, and the gradients of the step in progress
model_rows: the rows of all modules of a prepared model: opened, pushed and clocked with its steps
"""
