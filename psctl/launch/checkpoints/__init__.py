"""Checkpoints on the hosts of jobs.

checkpoint_actions: find, verify, export, prune, pull and copy a checkpoint
checkpoint_listing: the checkpoints of jobs, on their heads or as copies
checkpoint_queries: calls of the checkpoint tool on a host
manifest_trust: signatures of manifests, and what a restored job runs
"""
