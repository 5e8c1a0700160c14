"""The orders of an agent: written by launch/, sent over standard input, read by agent/."""

from __future__ import annotations

import msgspec

from psctl.message_costs import UNKNOWN_COSTS, MeasuredCosts
from psctl.types import PLAIN, Address, Compression, JsonObject


class HostOrder(msgspec.Struct, frozen=True):
    """A host's part in the job."""

    name: str
    address: str  # numeric; listeners bind it, other hosts connect to it
    interface: str  # for GLOO_SOCKET_IFNAME; "" when unknown
    cores: int
    gpus: int
    workers: int  # number of worker ranks on this host; ranks are assigned in roster order
    may_serve: bool  # servers may be placed here
    rate: float = 0.0  # payload bytes/s of the interface, one direction, measured or nominal; 0: unknown
    slots: int = 0  # most workers that this job may have on this host, `workers` included
    kernel: str = ""  # hosts with the same value share their processors (containers, namespaces); "" when unknown
    rdma: str = ""  # for NCCL_IB_HCA: "=mlx5_0:1,mlx5_1:1"; "" when there are none, or none of this network


class CheckpointOrder(msgspec.Struct, frozen=True):
    """When and where to save."""

    to: str | None
    every_steps: int  # 0: not by steps
    every_seconds: float  # 0: not by time
    keep: int
    keep_best: tuple[str, str] | None  # (metric, "min" | "max")
    on_stop: bool
    copies: int
    every_auto: bool = False  # by time, at the interval that the measured cost and the losses give
    full_every: int = 1  # checkpoints of tables of which one is written in full


class ExportOrder(msgspec.Struct, frozen=True):
    """The programs beside psctl that get the job's metrics; None: not this one."""

    tensorboard: str | None = None  # folder on the head; "": in the job's folder
    prometheus: Address | None = None  # where the head serves them
    mlflow: str | None = None  # URI
    wandb: str | None = None  # project, or entity/project


class ReaderOrder(msgspec.Struct, frozen=True):
    """A process of a group that reads the servers (`groups:`); its rank as a member is its place in the list."""

    group: str
    argv: list[str]  # after the interpreter
    rank: int  # within its group
    world: int  # number of processes of its group
    host: int  # index into the job's hosts
    spread: int | None  # steps by which the parameters of one read may differ; None: any
    parameters: tuple[str, ...]  # patterns of the parameters that it reads
    stores: tuple[str, ...]  # patterns of the stores that it reads


class JobOrder(msgspec.Struct, frozen=True):
    """The job as the coordinator, agents and planner need it."""

    name: str  # "digits-3"
    argv: list[str]  # after the interpreter: ["train.py", "--epochs", "10"] or ["-m", "pkg.train", ...]
    hosts: list[HostOrder]  # the first is the head
    servers: int | None  # None: the plan decides
    strategy: str
    update: str
    seed: int
    size: int | None
    start_timeout: float
    stall_timeout: float
    total_timeout: float | None
    report_seconds: float
    ports: tuple[int, int] | None  # inclusive range that listeners keep to
    checkpoint: CheckpointOrder
    resume: str | None  # folder of the checkpoint on the head host
    resume_id: str | None  # "digits-3@500"
    code_hash: str
    job_file: str  # text of job.yaml, for the manifest
    environment: dict[str, str]  # from the job file, secrets left out
    congestion: str  # auto | reno | cubic | bbr
    sealed: bool = True  # psctl's data connections between processes are encrypted
    require_encryption: bool = False  # no training traffic may be sent between hosts unencrypted
    restarts: int = 3  # losses that the job survives
    elastic: tuple[int, int] | None = None  # fewest and most workers; None: as many as `hosts` have
    restart_wait: float = 0.0  # seconds for lost hosts to return when the others have too few slots
    replicas: int | None = 0  # copies of every shard beyond the first; None: 1 where there are two servers
    on_worker_loss: str = "restart"  # restart: all workers return to the last checkpoint | wait | continue
    topology: JsonObject | None = None  # the document of `topo -o json` for these hosts; None: nominal rates alone
    staleness: int | None = 0  # clocks that the fastest worker may be ahead of the slowest; 0: bsp; None: asp
    period: int = 1  # steps that workers take alone between two synchronizations; 1: none
    compression: Compression = PLAIN
    share: str = "even"  # of a step's examples: even | speed, by measured speeds
    sums: str = "auto"  # of gradients before they are pushed: by host | rack | auto
    factor_rows: int | None = None  # rows of a worker's batch, where gradients of linear layers may go as factors
    compute: float | None = None  # seconds of compute of a step, for the plan
    replan: bool = False  # another strategy may be taken at a checkpoint, when the first steps are measured
    joint_batch_norm: bool = False  # BatchNorm's statistics are of all workers' batches
    bucket: int | None = None  # bytes of gradients that a collective sums together; 0: measured in the first steps
    step_in_backward: bool = False  # some parameters are stepped while backward runs (update: sharded)
    log_limit: int = 10**9  # bytes of the log files of a rank on a host
    added: int = 0  # so many of `hosts`, the last ones, were added while the job ran
    costs: MeasuredCosts = UNKNOWN_COSTS  # of messages
    exports: ExportOrder = ExportOrder()
    readers: list[ReaderOrder] = []  # of all groups


class AgentOrders(msgspec.Struct, frozen=True):
    """The orders of one agent. They contain secrets and keys, so they are never written to disk and never printed."""

    job: JobOrder
    host: int  # index into job.hosts
    python: str  # interpreter for workers and servers
    paths: list[str]  # put first on PYTHONPATH: psctl's own archive, the dependencies' folder
    workdir: str  # psctl's folder on this host
    job_dir: str  # this job's folder on this host: logs, socket, event log
    code_dir: str  # workers start in it: the job's code, its data, and what the script writes
    authority: str  # PEM of the job's certificate authority
    certificate: str
    key: str
    preauth_secret: str  # hex; proven by both ends before TLS (transport/protocol/preauth.py)
    coordinator: Address | None  # None on the head, whose agent starts it
    authority_key: str  # PEM, on the head only ("" elsewhere): for the coordinator alone
    secrets: dict[str, str]
    grace: float  # seconds between TERM and KILL
    restarted: JsonObject | None = None  # the job runs, and its leadership is this Configuration (leadership_messages)
