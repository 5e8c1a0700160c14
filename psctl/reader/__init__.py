"""The reader: the library part of psctl that runs in the script of a group that reads the servers (`groups:`).

group_reader: `psctl.init_reader()`: the object with which such a script reads parameters and rows
reader_session: the session with the coordinator: the decision, the servers, the end of training
parameter_reader: reads parameters from the servers, all of one step
live_rows: reads rows of stores from the servers
"""
