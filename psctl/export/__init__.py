"""The exporter: a process on the head that passes the metrics of the event log to other programs.

main: the process: one thread for each program, so that none waits for another
log_reader: reads the event log while it grows
metric_records: the numbers of an event, by name and step; pure
job_gauges: the present numbers of a job; pure
tensorboard_export: event files for TensorBoard
prometheus_export: a page for Prometheus
mlflow_export: a run in MLflow
wandb_export: a run in Weights & Biases
"""
