"""Checkpoints on the hosts of jobs.

checkpoint_actions: find, verify, export, prune, pull and copy a checkpoint
checkpoint_listing: calls of the checkpoint tool on hosts, and lists of checkpoints
target_actions: lists, verifies and pulls checkpoints at `checkpoint.to`
manifest_trust: signatures of manifests, and what a restored job runs
"""
