"""The coordinator's process: it runs the job's state machine and carries out its instructions.

main: takes inputs from one queue, passes them to the state machine and carries out the instructions
connections: the connections of all members; bulk data passes through them without the state machine
sessions: the coordinator's ends of the sessions with members
journal: the inputs from which a successor continues
journaled_state_machine: the state machine with its journal
standby_copy: the copy of the journal on the standby, and the configurations that agents accept
replication: what may be carried out, and which configurations hold
event_log: the job's event log on the head's disk, also when that is full
checkpoint_saver: writes, verifies, prunes and copies checkpoints
checkpoint_uploader: uploads checkpoints to `checkpoint.to`
streams: which worker reads which shard of a stream; without sockets, files or threads
policies: decisions with a theory of their own, without the state of a job
state: the state machine, without sockets, files or threads
"""
