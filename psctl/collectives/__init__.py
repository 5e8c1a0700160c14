"""Collectives: schedules played on torch tensors, over psctl's data plane or the engine's point-to-point operations.

allreduce_backends: sums of vectors over all ranks, by the engine's all-reduce or by a schedule; broadcast
partitioned_sums: the two halves of an all-reduce, by the engine or by a schedule
player: plays one rank's part of a schedule on vectors, step by step
rank_program: one rank's part of a schedule: sends, receives and writes, and their order
schedule_chunks: a vector cut into the chunks of a schedule, and the writes to chunks
channel: the protocol of channels, which move pieces between ranks, the engine's channels, and one inside a process
data_plane: psctl's channel for vectors on the CPU: shared memory inside a host, TCP streams between hosts
rendezvous: connects the processes of a schedule
stream_pieces: pieces over TCP streams between hosts
group_collectives: the collectives of the training script, run.all_reduce and the others
call_agreement: all ranks compare their calls before data moves
payloads: what a script gives: tensors, or plain values as msgpack
reduce_operations: sum, mean, prod, min, max
collective_links: the connections that these collectives are carried out with
group_channel: a channel among some ranks
shm_exchange: short vectors that the ranks of one host exchange through shared memory
"""
