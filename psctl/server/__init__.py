"""The server process: holds shards of parameters and tables, applies updates, answers workers.

main: one server from its orders to its end: the coordinator's messages, loading, checkpoints
peer_connections: connections of workers and other servers: access, replacement, end; for both protocols
dense_connections: the protocol of dense parameters: messages to the shards' state machines and their answers
table_connections: the protocol of tables, and the coordinator's messages about them
live_reads: reads of tables by the job's readers
snapshot_reads: reads of tables by readers outside the job
"""
