"""Tables: rows by key under a reduction.

reductions: commutative monoids on rows
row_bags: sums of rows that servers make, and gradients of such sums
row_changes: which rows have changed since a cut
row_filters: which pushed rows a worker sends, and in which form
row_index: rows by 64-bit key
retention: which rows a table takes and keeps: admission, expiry, eviction
row_initialisers: start values of rows by seed and key
row_optimizers: optimizers of rows, and their state
table_bytes: entries and shards of tables as bytes
table_kinds: a table's description with its functions
table_packing: keys and rows as the bytes of a payload
table_state: a shard of a store as a state machine
client: a worker's end
server: a server's end
"""
