"""Collectives as data: schedules, their proof and their text.

algorithms: builders of schedules, by strategy
checker: the proof that a schedule keeps its contract
contracts: the contract of each collective
describe: a schedule as text
groups: some ranks of a job
operation_check: the trial of a user's function as a reduction
phases: all-gather and reduce-scatter phases that all-reduces are made of
schedule: transfers, messages and schedules as values
"""
