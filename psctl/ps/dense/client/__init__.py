"""A worker's end of the dense shards.

backward_shards: which shards step in backward
dense_client_state: the state machine of a worker: pushes, step orders, pulls
host_collection: which pushes of one host's workers go together
parameter_reads: a reader's read of all parameters at one step
pending_values: the values that a wait is missing
receive_buffers: where received values and norms are kept
send_buffers: where gradients and their codes are kept until they are acknowledged
value_relay: how the values of a shard are forwarded within a rack
unacked_pushes: the leader of each shard, and what must be sent again
"""
