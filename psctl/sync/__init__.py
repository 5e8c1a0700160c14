"""Synchronizers, which combine a worker's gradients with those of the other workers, one for each strategy.

synchronizer: the base class, itself the synchronizer of one worker, and the weight of a rank's gradient
build_synchronizer: builds the synchronizer that the coordinator decided on, and loads the model's start values
piecewise_sync: the base of synchronizers that step the user's optimizer piece by piece, elsewhere than in the script
value_waits: the points at which a model waits for new values
sharded_sync: `update: sharded`, where each rank steps a part of the parameters, and holds this part of the state
backward_steps: steps of some of their buckets while backward still runs
bucket_partition: the division of a bucket's vector among these ranks
ps_sync: strategy `ps` with the optimizer on servers
allreduce_sync: writes the averaged gradient into `.grad`, for optimizers on workers
bucket_allreduce: the reducer of collectives: gradients in buckets, summed while backward runs
bucket_layout: divides gradients into buckets, and lays their vectors out
choice_tuner: chooses the size of buckets, or how many are stepped in backward, in the first steps by measurement
recoverable_reducer: the same where lost workers are replaced while the others keep their values
start_broadcast: gives rank 0's start values to all ranks
linear_factors: the factors of a linear layer's gradient, which are sent in place of the gradient
replacement_state: the training state that such a replacement takes from another rank
local_sgd: ranks that step alone and average their changes every H steps
flat_parameters: copies between parameters and the client's flat buffers, and the reducer over servers
gpu_staging: the same for parameters on GPUs: gradients are copied to the host before they are pushed
ddp_hook: sums the buckets of torch's DistributedDataParallel, as its communication hook
device_copies: copies between GPU and host memory, ordered by CUDA streams and events
device_sum: sums vectors of GPUs in host memory
gradient_hooks: hooks on parameters that count gradients into buckets during backward
gradient_trace: a record of when gradients were computed and sent, as JSON lines
"""
