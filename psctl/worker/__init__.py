"""The worker: the library part of psctl that runs in the user's script.

init: `psctl.init()`: joins the job that started this process, or makes a run without a job
ddp: `psctl.accelerate_ddp()`: has the gradients of a DistributedDataParallel summed by the job's planned strategy
run: the run: the object with which a script does everything
training_progress: steps, epochs, position in the data, and checkpoints between steps
loader: the loader of a run: batches by seed, epoch and clock, shared by the ranks
shard_stream: a stream, an IterableDataset made of shards, and the readers of the shards that are open
stream_loader: the loader of a stream: batches of the shards that the coordinator gives to this rank
shard_requests: the requests for shards, to the coordinator or to a list in this process
collective_calls: the collectives that a script calls, run.all_reduce and others
joint_layers: the BatchNorm layers that normalise with the batches of all workers
rank_connections: the connections of all workers for these
coordinator_session: the session with the coordinator: requests, answers and waits
plane_connections: the data plane of a worker: its connections to other workers, also after a loss
followed_loop: the steps of a loop that belongs to a library
standalone: the session of a run without a coordinator, and its lines of progress
step_profiler: profiles some steps when the agent requests it
step_reports: numbers that the script reported, and the thread that sends them and heartbeats
bench_script: the script of `psctl bench`
bench_collectives: the collectives that it measures beside all-reduce
bench_patterns: vectors with known sums, to check what `bench` measures
"""
