"""A worker's end of a store.

calls_in_flight: changes and reads that servers have not answered, and the session with each server
key_routes: which keys of a call go to which shard
row_cache: cached rows of one table, and a worker's own pushes
row_view: a worker's view of a store's rows and clocks
single_key_batches: pushes and reads of single rows that are sent together
table_client_state: the state machine of a worker's end of one store
"""
