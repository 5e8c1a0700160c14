"""A server's end of the dense shards.

aggregation: sums the pushes of a clock (bsp, ssp) or applies each push (asp)
checkpoint_parts: the part of a checkpoint, from the snapshots of the shards
dense_server: the state machine of a server: all of its shards
dense_shard: the state machine of one shard
push_staging: pushes while they are received and until they are summed
shard_reads: reads of a shard by the job's readers
shard_answers: answers to pulls and norm queries, and the versions that workers may be reading
"""
