"""A server's end of all stores.

client_sessions: the sessions of workers with a store
read_answers: answers to reads, and messages held until all replicas have the versions that they depend on
saved_names: names of the tensors of tables in a checkpoint
saved_tables: tables in a checkpoint
table_checkpoints: a server's part of a checkpoint, complete or incremental
table_server: the state machine of a server's tables
table_shard: one shard of all stores on one server: its state and its chain
"""
