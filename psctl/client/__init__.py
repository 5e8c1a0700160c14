"""The worker's end of the parameter server, and connections to servers for workers and servers.

dense_client: push, pull and wait of dense parameters
rack_connections: connections between workers of one rack that sum their gradients
server_connections: one connection to each server of the newest assignment
server_waits: waits for servers' answers, and the time that requests are in flight
shared_buffers: buffers in shared memory, and those of other processes of the host
host_aggregation: sums the gradients of a host's workers before one of them pushes the sum
host_connections: connections between the workers of a host
model_layout: the layout of a user's model and optimizer
malloc_settings: keeps freed memory in the process
"""
