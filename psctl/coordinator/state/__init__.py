"""The state machine of a job: inputs in, instructions out; no socket, file, clock or thread.

job_state_machine: passes each input to its topic, and refuses messages that cannot be true
instructions: the inputs and the instructions
job_state: the ranks and hosts of a job, and the state of each topic
startup: from the first agent to the first step
plan_check: compares the first steps with the plan, and changes the strategy where another is faster
progress: steps, heartbeats, printed lines and reported numbers
checkpoints: common steps, parts of checkpoints, commits and copies
losses: which failures the job survives, and how
outages: the wait for most hosts at once, when the head's own link is down
takeover: a new coordinator continues the job of one that was killed
partitions: two hosts that do not reach each other
returning_hosts: lost hosts that return, and may be used again
restart: the restart of all processes from a checkpoint
lost_workers: the last clock of a lost worker that counts, and its replacement, under ps
collective_losses: lost workers under collectives, and new connections between workers
script_collectives: workers connect for the collectives of the training script
example_division: the division of examples when workers are lost and not replaced, join or leave
joining_workers: workers that join and leave while the others train
server_changes: losses, replacements, joins and releases of servers; shards of parameters
table_placement: the servers that hold tables, and their shards
reading_groups: groups that read the servers while the workers train
sum_order: the order in which gradients are summed
scaling: `psctl scale`
stalls: slow and stalled workers, the ranks that they wait for, and stacks
deadlines: the waits that have become too long
ending: the phases of a job's end, and the failure that caused it
"""
