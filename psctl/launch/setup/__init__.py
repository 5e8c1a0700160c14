"""A cluster as a whole: `psctl doctor`, `up` and `down`.

cluster_setup: makes hosts ready, for `up`, `train` and `bench`
doctor: `psctl doctor`: checks of every host
teardown: `psctl down`: removes psctl's files from hosts
"""
