"""Checkpoints on the hosts of jobs.

checkpoint_actions: find, verify, export, prune, pull and copy a checkpoint
checkpoint_listing: calls of the checkpoint tool on hosts, and lists of checkpoints
target_actions: the same for checkpoints at `checkpoint.to`, which this machine reaches itself
manifest_trust: signatures of manifests, and what a restored job runs
"""
