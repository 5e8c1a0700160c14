"""Checkpoints as folders of safetensors files with a signed manifest.

catalog: lists, finds and removes the checkpoints of a job
copies: copies a checkpoint from one machine to another
disk: the disk operations of checkpoints
export: the model of a checkpoint as one safetensors file
manifest: the content of a checkpoint, and its checks
partial_files: files while parts of them arrive
reader: opens, verifies and reads a checkpoint
state_file: rank 0's state as JSON
tensorfile: the safetensors format
tool: answers questions about checkpoints on a host
upload: checkpoints at `checkpoint.to`
writer: writes a checkpoint, complete or absent
"""
