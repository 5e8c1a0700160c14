"""Builders of schedules.

bruck: all-gather and all-to-all by doubling, for any number of ranks
catalog: the builder of each strategy, by name
collectives: all collectives but all-reduce, by name and algorithm
doubling: recursive doubling and halving-doubling
hierarchical: all-reduce within groups and across them
parameter_server: push and pull through servers
ring: rings in one or both directions, and several rings
root: through one rank or the processor
sharded: each rank sums a part, or all of it at once
split: an all-reduce divided into its reduce-scatter and its all-gather
trees: binomial tree, chains, binary trees, packed trees
"""
