"""The predicted time of a schedule on a network.

cost_model: rates and costs of messages until they are measured
estimates: stepwise times and lower bounds without a simulation
flow_rates: max-min fair rates of flows that share links
flow_simulation: simulation of a schedule's messages as flows
message_dependencies: the dependencies of the messages of a schedule
routes: a cluster as directed links, and routes between places
schedule_timing: costs, predicted times and their parts
symmetry: one rank simulated for all where all do the same
"""
