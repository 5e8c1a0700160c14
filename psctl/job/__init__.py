"""Messages, events and pure decisions that several processes of a job share.

message: the base of the messages to and from the coordinator
process_messages: between the coordinator and agents: processes, output, stops, scaling, certificates
training_messages: between the coordinator and workers or servers: start, reports, end
checkpoint_messages: parts, reads and copies of checkpoints, and the step at which one is made
membership_messages: changes of workers, servers and the servers of each shard
leadership_messages: which host leads, its copy on the standby, and votes between agents
session_messages: the resumption of a member's session on a new connection
message_session: the numbered messages of a session, kept until they are acknowledged
stream_messages: the shards of streams that workers read
reader_messages: between the coordinator and readers: reports, the end of training
table_server_messages: the servers that hold tables, and reads from outside the job
control_answers: the answers of an agent to psctl's commands
job_permits: which member may send which message to the coordinator, and receive which from it
events: the job's event log
lifecycle: the states of a job, of a rank, of a job's end and of a restart, as tables
failures: the first of several failures, and its description for people
silence: how long connections to the coordinator, and agents, bear silence
run_parameters: the parameters of a run for experiment trackers
activity: the activity that a heartbeat reports
environment: the environment variables of workers and servers
examples: the examples of each clock, and each rank's share
layout_comparison: the first difference between the models of two ranks
bench_messages: the questions of `psctl bench` to workers, and their answers
"""
