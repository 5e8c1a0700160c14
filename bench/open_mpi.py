"""Open MPI's collectives, timed as `psctl bench` times psctl's; for the benches that compare the two.

A time is the slowest rank's from a barrier on. Bytes are counted as nccl-tests count them: the whole vector of an
all-reduce, reduce or broadcast; what all ranks hold together of a gather, scatter, all-gather and reduce-scatter; what
a rank gives to all of an all-to-all.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCE = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void play(const char *name, float *from, float *into, int count, int world) {
    MPI_Comm all = MPI_COMM_WORLD;
    int part = count / world;
    if (!strcmp(name, "allreduce")) MPI_Allreduce(MPI_IN_PLACE, from, count, MPI_FLOAT, MPI_SUM, all);
    else if (!strcmp(name, "broadcast")) MPI_Bcast(from, count, MPI_FLOAT, 0, all);
    else if (!strcmp(name, "reduce")) MPI_Reduce(from, into, count, MPI_FLOAT, MPI_SUM, 0, all);
    else if (!strcmp(name, "gather")) MPI_Gather(from, part, MPI_FLOAT, into, part, MPI_FLOAT, 0, all);
    else if (!strcmp(name, "scatter")) MPI_Scatter(from, part, MPI_FLOAT, into, part, MPI_FLOAT, 0, all);
    else if (!strcmp(name, "all-gather")) MPI_Allgather(from, part, MPI_FLOAT, into, part, MPI_FLOAT, all);
    else if (!strcmp(name, "reduce-scatter")) MPI_Reduce_scatter_block(from, into, part, MPI_FLOAT, MPI_SUM, all);
    else if (!strcmp(name, "all-to-all")) MPI_Alltoall(from, part, MPI_FLOAT, into, part, MPI_FLOAT, all);
    else MPI_Abort(all, 2);
}
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    for (int at = 2; at < argc; at++) {
        long bytes = atol(argv[at]), count = bytes / 4;
        float *from = calloc(count + world, 4), *into = calloc(count + world, 4);
        double begun = MPI_Wtime();
        int rounds = bytes > 1 << 22 ? 9 : 201, enough = 0;
        for (int round = -2; round < rounds && !enough; round++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double mine = MPI_Wtime(), slowest;
            play(argv[1], from, into, (int)count, world);
            mine = MPI_Wtime() - mine;
            MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
            if (rank == 0 && round == 0) printf("%ld", bytes);
            if (rank == 0 && round >= 0) printf(" %.9f", slowest);
            enough = round >= 4 && MPI_Wtime() - begun > 20;
            MPI_Bcast(&enough, 1, MPI_INT, 0, MPI_COMM_WORLD);
        }
        if (rank == 0) printf("\n");
        free(from); free(into);
    }
    MPI_Finalize();
    return 0;
}
"""


def compile_bench(folder: Path) -> Path | None:
    """Return the compiled program; None where Open MPI or its compiler is not installed."""
    if not shutil.which("mpirun") or not shutil.which("mpicc"):
        return None
    (folder / "bench.c").write_text(SOURCE)
    subprocess.run(["mpicc", "-O2", "-o", str(folder / "bench"), str(folder / "bench.c")], check=True)
    return folder / "bench"


def measure(
    run: Callable[[list[str]], str], words: Sequence[str], operation: str, sizes: Sequence[int]
) -> dict[int, float]:
    """Return the median seconds by size.

    Args:
        run: runs a command; returns its output.
        words: `mpirun` with its options, and the program.
        operation: a collective, as `psctl bench` names it.
        sizes: bytes.
    """
    lines = run([*words, operation, *map(str, sizes)]).splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    return {int(row[0]): statistics.median(map(float, row[1:])) for row in rows}
