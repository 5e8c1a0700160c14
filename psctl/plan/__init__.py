"""The predicted times of all strategies on given machines, and the choice with its reasons.

allreduce_times: closed forms of all-reduce times
by_size: the chosen strategy by the bytes of gradients
calibrate: costs of messages fitted to measurements
candidates: the best prediction of each strategy
capacity: memory, checkpoints and costs of consistency for a number of parameters
choose: the choice of a strategy
collective_choice: predicted times of all collectives, and the fastest algorithm by size
collective_times: closed forms of the collectives that are no all-reduce
feasibility: why a strategy is not possible
in_network: the time of sums in InfiniBand switches, to compare with
overlap: the time of a step, and what compute hides of its synchronisation
served_steps: the time of a push and a pull, and of the step around it
summed_steps: the time of a sum in buckets, and of the step around it
step_terms: the terms of a step's time, one by one
factor_layers: linear layers whose gradients are sent as factors
compression_cost: bytes and processor time under compression
plan_input: the request and the machines that a plan is made for
rank_orders: orders, groups and weights of ranks that follow from the machines
reasons: the reason of a choice in a sentence
server_placement: hosts of servers, and the time of a push and a pull
simulation: predicted times of schedules on a network
uniform_forms: closed forms for worlds too large to simulate
"""
