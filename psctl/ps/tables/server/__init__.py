"""A server's end of all stores.

client_sessions: the sessions of workers with a store
read_answers: answers to reads, and messages held until all replicas have the versions that they depend on
saved_tables: tables in a checkpoint
table_server: the state machine of a server's tables
table_shard: one shard of all stores on one server: its state and its chain
"""
