"""The training state of a worker in checkpoints, and the agreements with the coordinator on steps and examples.

prepared_model: the prepared model, hooks on its modules, and the step of the prepared optimizer
joint_batch_norm: BatchNorm layers with the mean and variance of all workers' batches
training_parts: model, optimizer, scheduler and tracked objects as named tensors and JSON values
state_trees: nested dicts and lists of tensors as JSON and named tensors, and back
random_generators: python's, numpy's and torch's generators: seeded within steps, the script's own outside
rank_state: a rank's own state as bytes, for a worker that replaces a lost one
example_sharing: the position in the data, and the ranks that share the examples of each clock
dcp_export: a checkpoint in the format of torch.distributed.checkpoint
dcp_calls: torch.distributed.checkpoint in one process alone, in each version of torch
start_values: `psctl.load_start_values()`: start values from the files of other libraries
common_step: the agreement of all workers on one step to save or stop at
"""
