"""The parameter server's protocol without a network: state machines that take messages and return messages.

messages: messages between workers and servers about dense parameters, and those that tables share
outputs: instructions that the state machines of servers and workers return
permits: which role may send which message, and how large it may be
pieces: the parts of parameters that lie in one shard, and views of their memory
received_slices: memory for slices of tensors that arrive in parts
server_optimizers: which optimizers servers can run, and an optimizer over the pieces of a shard
shards: cuts the flat parameter spaces into shards
snapshot: a shard's slices of a checkpoint, to save and to load
table_messages: messages between workers and servers about tables
compression: gradients in fewer bytes
dense: shards of dense parameters
replication: the chain of replicas of one shard
tables: rows by key under a reduction
"""
