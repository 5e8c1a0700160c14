"""What a worker finds in its environment beyond torchrun's variables."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.job.environment import WorkerSeats, worker_environment, worker_places
from psctl.orders import JobOrder
from tests.helpers.orders import make_hosts, make_order

(HOST,) = HOSTS = make_hosts(1)
ORDER = make_order(HOSTS, servers=None, strategy="auto", update="auto")


def test_the_engines_use_the_network_by_which_the_hosts_reach_each_other() -> None:
    found = worker_environment(ORDER, WorkerSeats(worker_places(ORDER)), 0)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0")
    assert "NCCL_IB_HCA" not in found
    rails = replace(ORDER, hosts=[replace(HOST, interface="ib0", rdma="=mlx5_0:1,mlx5_1:1")])
    found = worker_environment(rails, WorkerSeats(worker_places(rails)), 0)
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_IB_HCA"]) == ("ib0", "=mlx5_0:1,mlx5_1:1")
    own = replace(rails, environment={"NCCL_IB_HCA": "mlx5_7"})
    assert worker_environment(own, WorkerSeats(worker_places(own)), 0)["NCCL_IB_HCA"] == "mlx5_7"


@pytest.mark.parametrize(
    ("order", "spins"),
    [
        (ORDER, "1000"),
        (replace(ORDER, strategy="ps"), "1000"),
        (replace(ORDER, strategy="native"), None),
        (replace(ORDER, strategy="ring"), None),
        (replace(ORDER, hosts=[replace(HOST, may_serve=False)]), None),
        (replace(ORDER, environment={"OMP_WAIT_POLICY": "active"}), None),
        (replace(ORDER, environment={"GOMP_SPINCOUNT": "7"}), "7"),
    ],
)
def test_openmps_threads_sleep_soon_where_a_server_may_share_their_cores(order: JobOrder, spins: str | None) -> None:
    found = worker_environment(order, WorkerSeats(worker_places(order)), 0)
    assert found.get("GOMP_SPINCOUNT") == spins
    assert found["OMP_NUM_THREADS"] == "4"
