"""The tree behind words: what shares a switch, a slot, a processor; and words that no tree has."""

from __future__ import annotations

from psctl.topology.host import pcie_derivation, sockets
from psctl.topology.host.pcie_derivation import PcieBranch
from psctl.topology.readings import Affinity


def levels(*rows: str) -> dict[frozenset[str], int]:
    """Rows such as "A B PIX"."""
    return pcie_derivation.levels_of({(row.split()[0], row.split()[1]): row.split()[2] for row in rows})


def shape(branch: PcieBranch) -> object:
    return branch.id if not branch.below else [shape(below) for below in branch.below]


def test_one_bridge_is_one_switch_and_devices_without_a_nearer_word_stand_alone() -> None:
    tops, doubts = pcie_derivation.tree(
        "ABCD", levels("A B PIX", "A C PIX", "B C PIX", "A D PHB", "B D PHB", "C D PHB")
    )
    assert [shape(top) for top in tops] == [["A", "B", "C"], "D"]
    assert not doubts


def test_several_bridges_below_one_port_are_switches_below_a_switch() -> None:
    near = levels("A B PIX", "C D PIX", "A C PXB", "A D PXB", "B C PXB", "B D PXB", "A E PXB", "C E PXB")
    tops, doubts = pcie_derivation.tree("ABCDE", near)
    assert [shape(top) for top in tops] == [[["A", "B"], ["C", "D"], "E"]]
    assert not doubts


def test_what_nvlink_hides_follows_from_a_third_device() -> None:
    tops, _ = pcie_derivation.tree("ABN", levels("A N PIX", "B N PIX"))  # A and B are NV1 to each other
    assert [shape(top) for top in tops] == [["A", "B", "N"]]


def test_words_that_no_tree_has_are_reported_and_left_out() -> None:
    tops, doubts = pcie_derivation.tree("ABC", levels("A B PIX", "B C PIX", "A C PHB"))
    assert [shape(top) for top in tops] == [["A", "B"], "C"]
    assert len(doubts) == 1
    assert "B-C (PIX)" in doubts[0].what


def test_instances_of_one_gpu_share_its_slot() -> None:
    tops, _ = pcie_derivation.tree(["GPU0/GI0", "GPU0/GI1", "GPU1"], {})
    assert [shape(top) for top in tops] == [["GPU0/GI0", "GPU0/GI1"], "GPU1"]


def leaves(*ids: str) -> list[PcieBranch]:
    return [PcieBranch(one) for one in ids]


def test_a_listed_numa_node_decides() -> None:
    cpus, on = sockets.place(leaves("A", "B"), {"A": 3, "B": 1}, levels("A B SYS"))
    assert on == ["CPU3", "CPU1"]
    assert [(cpu.id, cpu.numa, cpu.derived) for cpu in cpus] == [("CPU1", 1, True), ("CPU3", 3, True)]


def test_a_nic_goes_with_the_gpus_that_it_is_near() -> None:
    near = levels("A B SYS", "A N SYS", "B N NODE")
    assert sockets.place(leaves("A", "B", "N"), {"A": 0, "B": 1}, near)[1] == ["CPU0", "CPU1", "CPU1"]


def test_a_nic_across_from_all_gets_a_processor_of_its_own() -> None:
    near = levels("A B SYS", "A N SYS", "B N SYS")
    cpus, on = sockets.place(leaves("A", "B", "N"), {"A": 0, "B": 3}, near)
    assert on == ["CPU0", "CPU3", "CPU1"]
    assert [cpu.numa for cpu in cpus] == [0, None, 3]


def test_without_numa_nodes_the_words_give_the_fewest_processors() -> None:
    near = levels("A B PHB", "C D PHB", "A C SYS", "A D SYS", "B C SYS", "B D SYS")
    assert sockets.place(leaves(*"ABCD"), {}, near)[1] == ["CPU0", "CPU0", "CPU1", "CPU1"]
    assert sockets.place(leaves(*"ABC"), {}, {})[1] == ["CPU0"] * 3
    assert sockets.place([], {}, {}) == ([], [])


def test_words_of_a_virtual_machine_keep_nothing_apart() -> None:
    near = levels("A B SYS", "A N SYS", "B N SYS")
    assert sockets.place(leaves("A", "B", "N"), {"A": 0, "B": 0}, near)[1] == ["CPU0"] * 3


def test_lists_of_cores_separate_processors_only_where_they_differ() -> None:
    two = {"A": Affinity("20-39,60-79"), "B": Affinity("0-19,40-59"), "C": Affinity("20-39,60-79")}
    assert sockets.by_cores(two) == {"A": 1, "B": 0, "C": 1}
    assert sockets.by_cores({"A": Affinity("1-1"), "B": Affinity("1-1")}) == {}
