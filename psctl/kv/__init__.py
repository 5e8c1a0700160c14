"""The (key, value) store of a training script, `run.store()`.

open_store: the stores of a run: checks the options and opens each store once
store: the store: push, pull, wait, clock
arguments: checks and converts the arguments and results of a store's calls
prefetched_rows: rows that were requested one clock ahead
tickets: asynchronous calls, and the order in which they start
table_export: exports a store's rows of a checkpoint
parquet_file: writes an exported table by pyarrow
table_reader: reads an exported table for inference
store_connections: sessions with the servers of a job, or with one server in this process
"""
