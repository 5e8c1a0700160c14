"""Shards of dense parameters: what workers and servers share.

clock_ledger: the members of each clock, and step orders until all members agree
host_sums: sums of the gradients of one host's ranks
buffer_allocator: allocates buffers that other processes of a host read in place
rank_state_store: buffers and tracked state of ranks, kept by clock
shard_state: a shard's values, optimizer state and vector clock
client: a worker's end
server: a server's end
"""
