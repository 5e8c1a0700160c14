"""Fuzz targets: every parser of bytes that come from outside, run on inputs that a fuzzer makes.

targets: the targets as data: the parser, the errors that it may raise, and inputs to begin with
table_machines: targets for the state machines of tables, and mutations of their messages
fuzz: runs one target under atheris, which keeps inputs that reach new code
test_table_machines: some thousand mutations of messages about tables
test_fuzz: every target on its first inputs and on kept crashes; in `make soak` a minute of atheris for each

An input that crashed a parser is kept in crashes/TARGET/ and is a test from then on.
"""
