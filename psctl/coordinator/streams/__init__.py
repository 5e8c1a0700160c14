"""Streams: which worker reads which shard.

shard_grants: answers to workers that want shards, and to losses and changes of workers
shard_readers: what each worker reads in an epoch, and its position at a step
"""
