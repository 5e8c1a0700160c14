"""Decisions of the coordinator with a theory of their own, without the state of a job.

assignment: an assignment of shards to servers with equal loads and few moves
shard_placement: the servers of each shard while a job trains
checkpoint_interval: the interval of `every: auto`, by Young's formula
"""
