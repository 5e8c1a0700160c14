"""The factors of a linear layer's gradient, which are sent in place of the gradient where they are fewer bytes.

The gradient of a weight of shape (out, in) is U^T X: X holds the layer's inputs, a row for each row of the batch, and U
the gradients of its outputs. With K rows a worker and P workers every worker gets all P K rows of both, P K (out + in)
elements in place of out * in, and multiplies them itself (sufficient factor broadcasting: Xie and others, 2015; the
choice by layer: Zhang and others, Poseidon, 2017). The rows of all ranks lie in rank order in one vector, which is
summed like a bucket of gradients: each rank fills in its own rows, and zeros elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from psctl.errors import UsageError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest difference between U^T X and the gradient that autograd computed, in parts of its largest element; by the
type in which the layer computed."""


class LinearFactors:
    """The rows that one linear layer has handled since the last step on this rank.

    Args:
        name: of the weight, for messages.
        layer: holds the weight; no other module does.
        rows: of a worker's batch, at most (`sync.factor_rows`).
        rank, world: this rank, and the number of ranks.
    """

    def __init__(self, name: str, layer: nn.Linear, rows: int, rank: int, world: int) -> None:
        self._name, self._layer, self._rows, self._rank, self._world = name, layer, rows, rank, world
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []  # (inputs, gradients of outputs)
        self._count = 0
        self._filled = False  # since the last rows came
        self._checked = False
        self._handle = layer.register_forward_hook(self._on_forward, with_kwargs=True)

    @property
    def elements(self) -> int:
        """Elements of the vector that is summed."""
        return self._world * self._rows * (self._layer.in_features + self._layer.out_features)

    def fill(self, vector: torch.Tensor, weight: float) -> None:
        """Write this rank's rows into the vector; it may be called again for the same rows.

        Args:
            vector: of `elements` elements; what it holds is overwritten.
            weight: of this rank's gradient; those of all ranks sum to their number.

        Raises:
            UsageError: the product of the factors is not the gradient of this rank. The script's fault.
        """
        if not self._checked:
            self._check()
        gradients, inputs = self._parts(vector.zero_())
        at = self._rank * self._rows
        for x, g in self._held:
            inputs[at : at + len(x)].copy_(x)
            torch.mul(g, weight / self._world, out=gradients[at : at + len(g)])
            at += len(x)
        self._filled = True

    def write_mean(self, vector: torch.Tensor, gradient: torch.Tensor) -> None:
        """Write the mean gradient of all ranks, given the summed vector."""
        gradients, inputs = self._parts(vector)
        if gradient.is_contiguous():
            torch.mm(gradients.t(), inputs, out=gradient)
        else:
            gradient.copy_(gradients.t() @ inputs)

    def clear(self) -> None:
        """Forget the rows: the optimizer has stepped."""
        self._held.clear()
        self._count = 0

    def close(self) -> None:
        """Remove the hook on the layer."""
        self._handle.remove()
        self.clear()

    def _parts(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of outputs, and the inputs, of all ranks' rows: views."""
        rows, out = self._world * self._rows, self._layer.out_features
        return vector[: rows * out].view(rows, out), vector[rows * out :].view(rows, self._layer.in_features)

    # Any: torch's hooks have these types; a layer's inputs are what the script passes.
    def _on_forward(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs.get("input")
        if torch.is_grad_enabled() and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._on_gradient, given.detach()))  # type: ignore[no-untyped-call]

    def _on_gradient(self, given: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._filled and self._layer.weight.grad is None:  # a step was left out
            self.clear()
        self._filled = False
        x, g = given.reshape(-1, self._layer.in_features), gradient.detach().reshape(-1, self._layer.out_features)
        self._count += len(x)
        if self._count > self._rows:
            raise UsageError(
                f"{self._name}: a step has {self._count} rows or more on rank {self._rank}, and sync.factor_rows is "
                f"{self._rows}",
                "set factor_rows to the rows of a worker's batch (times the positions of a sequence, and the passes of "
                "a step), or leave it out",
            )
        self._held.append((x, g))

    def _check(self) -> None:
        """Compare the product of the factors with the gradient that autograd computed; once."""
        computed = self._layer.weight.grad
        if computed is None or not self._held:
            return
        product = torch.zeros_like(computed)
        for x, g in self._held:
            product.addmm_(g.to(product.dtype).t(), x.to(product.dtype))
        narrow = min((g.dtype for _, g in self._held), key=lambda dtype: torch.finfo(dtype).bits)
        largest, apart = float(computed.abs().max()), float((product - computed).abs().max())
        if apart > TOLERANCE.get(narrow, 5e-2) * largest:
            raise UsageError(
                f"{self._name}: its gradient is not the product of its layer's inputs and output gradients (apart by "
                f"{apart:.3g}, largest element {largest:.3g}), as sync.factor_rows needs it",
                "the weight is used outside its layer, or a hook changes its gradient: leave factor_rows out",
            )
        self._checked = True
