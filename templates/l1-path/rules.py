"""What runs on the servers: one proximal step of each coordinate, when the gradients of all workers are there.

A row is one coordinate: WEIGHT, its REGION (how far it may move), the VIOLATION of the optimality conditions, whether
it is ACTIVE, and what has arrived for its next step: GRADIENT, CURVATURE, and the parts of the WORKERS, which add up to
1. A push has the same columns; each worker pushes its part of PENALTY, THRESHOLD (of the filter) and RATE (the step
size), so that they are there when all workers' gradients are.
"""

import torch

WEIGHT, REGION, VIOLATION, ACTIVE, GRADIENT, CURVATURE, WORKERS, PENALTY, THRESHOLD, RATE = range(10)
COLUMNS = 10
FIRST_REGION, LARGEST_REGION = 1.0, 5.0
SUMS = slice(GRADIENT, COLUMNS)


def start(keys, width):
    """The start values: weight 0, active."""
    rows = torch.zeros(len(keys), width, dtype=torch.float64)
    rows[:, REGION], rows[:, ACTIVE] = FIRST_REGION, 1.0
    return rows


def step(held, pushed):
    """Add a worker's push; step the rows for which it was the last."""
    rows = held.clone()
    rows[:, SUMS] += pushed[:, SUMS]
    due = rows[:, WORKERS] > 1.0 - 1e-9
    if due.any():
        rows[due] = proximal_step(rows[due])
    return rows


def proximal_step(rows):
    """Delayed block proximal gradient, algorithm 3 of Li and others (OSDI 2014), with the KKT filter."""
    weight, region, penalty, threshold = (rows[:, at] for at in (WEIGHT, REGION, PENALTY, THRESHOLD))
    curve = rows[:, CURVATURE] / rows[:, RATE] + 1e-10
    up, down = rows[:, GRADIENT] + penalty, rows[:, GRADIENT] - penalty
    zero = weight == 0
    violation = torch.where(up < 0, -up, torch.where(down > 0, down, torch.zeros_like(up)))
    other = torch.where(weight > 0, up.abs(), down.abs())
    move = torch.where(up <= curve * weight, -up / curve, torch.where(down >= curve * weight, -down / curve, -weight))
    move = torch.maximum(torch.minimum(move, region), -region)
    new = torch.zeros_like(rows)
    new[:, WEIGHT] = weight + move
    new[:, REGION] = torch.clamp(2 * move.abs() + 0.1, max=LARGEST_REGION)
    new[:, VIOLATION] = torch.where(zero, violation, other)
    new[:, ACTIVE] = (~(zero & (up > threshold) & (down < -threshold))).to(rows.dtype)
    return new
