"""BatchNorm layers that normalise with mean and variance of all workers' batches (`sync: {batchnorm: sync}`).

With N values of a channel over all workers, of which a worker holds n with mean m and squared deviations S = n var:

    forward    N = sum n;  mu = sum(n m) / N;  var = sum(S + n m^2) / N - mu^2;  x^ = (x - mu) / sqrt(var + eps)
    backward   dx = w / sqrt(var + eps) (dy - A / N - x^ B / N);  A = sum dy,  B = sum(dy x^)

All sums are over the values of all workers (Ioffe and Szegedy 2015, section 3, for one batch that is divided). Each
direction is one all-reduce of 2 C + 1 or 2 C numbers for C channels. They are float64, so the subtraction of squares
loses nothing that float32 values had: S is computed by each worker around its own mean.

The gradient of the joint loss, sum over workers k of v_k L_k with v_k the worker's part of the examples, is what the
strategy makes of the workers' gradients g_k: sum v_k g_k. A worker's x also changes the other workers' losses, so A and
B are sums of v_k A_k, divided by the worker's own v: with equal parts the plain sums.

The layers keep their names, parameters and buffers. `F.batch_norm` is replaced within their forward only, so a subclass
that does more (an activation, say) goes on doing it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, SupportsIndex

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from psctl.train_state.prepared_model import reduce_as


class JointSums(Protocol):
    """The sums over all workers that joint layers need."""

    def sum_ranks(self, vector: torch.Tensor, name: str) -> None:
        """Sum a vector of float64 over all workers, in place.

        Args:
            vector: of one length on all workers.
            name: of the sum, for people; every worker asks for the same sums in the same order.
        """

    @property
    def part(self) -> float:
        """This worker's part of the examples of the step, times the number of workers: 1.0 where all are equal."""


def requested(model: nn.Module, *, every: bool) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model whose statistics are joint, with their names.

    Args:
        model: the user's.
        every: the job file asks for it (`batchnorm: sync`); else only torch's SyncBatchNorm does, except over a group
            of ranks that the script made.
    """
    return [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (every or _is_for_all(module))
    ]  # fmt: skip


def join_batch_norm(layers: Iterable[tuple[str, nn.Module]], sums: JointSums) -> None:
    """Have layers normalise with the statistics of all workers' batches while they train.

    Args:
        layers: BatchNorm layers with their names, as `requested` returns them.
        sums: over all workers.
    """
    for name, module in layers:
        module.__class__ = _joint_class(type(module), f"BatchNorm layer {name}" if name else "BatchNorm layer", sums)


def _is_for_all(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm) and module.process_group is None


def _joint_class(original: type[nn.Module], name: str, sums: JointSums) -> type[nn.Module]:
    # SyncBatchNorm's own forward is for GPUs of one process group.
    forward: Callable[..., object] = _BatchNorm.forward if issubclass(original, nn.SyncBatchNorm) else original.forward

    class Joint(original):  # type: ignore[valid-type,misc]
        @untraced
        def forward(self, *args: object, **kwargs: object) -> object:
            if not self.training:
                return forward(self, *args, **kwargs)
            with _JointForward(name, sums):
                return forward(self, *args, **kwargs)

        def __deepcopy__(self, memo: dict[int, object]) -> object:
            with _as_class(self, original):
                return copy.deepcopy(self, memo)

        def __copy__(self) -> object:
            with _as_class(self, original):
                return copy.copy(self)

        def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
            return reduce_as(original, copy.copy(self), protocol)

    Joint.__name__, Joint.__qualname__ = original.__name__, original.__qualname__
    Joint.__module__, Joint.__doc__ = original.__module__, original.__doc__
    return Joint


@contextmanager
def _as_class(module: nn.Module, original: type[nn.Module]) -> Iterator[None]:
    """Give a layer its user's class within a context: a copy of it is on this worker alone."""
    joint = type(module)
    module.__class__ = original
    try:
        yield
    finally:
        module.__class__ = joint


class _JointForward(TorchFunctionMode):
    """Replaces `F.batch_norm` within a context."""

    def __init__(self, name: str, sums: JointSums) -> None:
        super().__init__()
        self._name, self._sums = name, sums

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:  # fmt: skip
        if func is F.batch_norm:
            return _batch_norm(self._name, self._sums, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    name: str, sums: JointSums, input: torch.Tensor, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Return what `F.batch_norm` would for the joint batch, and update the running statistics.

    Its arguments follow those of a joint layer, its name and sums.

    Raises:
        ValueError: one value a channel over all workers; on every worker.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    count, mean, var = _joint_statistics(name, sums, input)
    if count < 2:  # in torch's words
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            if running is not None:
                running.lerp_(now.to(running.dtype), momentum)
    kind = torch.float64 if input.dtype == torch.float64 else torch.float32
    normalised = _Normalise.apply(input, weight, bias, mean.to(kind), var.to(kind), eps, count, name, sums)  # type: ignore[no-untyped-call]
    assert isinstance(normalised, torch.Tensor), "it has one output"
    return normalised


def _joint_statistics(name: str, sums: JointSums, input: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the number of values a channel over all workers, and their mean and variance, float64, by channel."""
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    with torch.no_grad():
        if count:
            values = input if input.dtype == torch.float64 else input.float()
            var, mean = (each.double() for each in torch.var_mean(values, _other(input), correction=0))
            own[0] = count
            own[1 : channels + 1] = mean * count
            own[channels + 1 :] = (var + mean.square()) * count
        sums.sum_ranks(own, name)
        total = float(own[0])
        mean, squares = (own[1:] / max(total, 1.0)).chunk(2)
        return total, mean, (squares - mean.square()).clamp_(min=0.0)


def _other(input: torch.Tensor) -> list[int]:
    """Return all dimensions but the channels'."""
    return [dimension for dimension in range(input.dim()) if dimension != 1]


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics; their dependence on the values of all workers is in its backward."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor,
        var: torch.Tensor, eps: float, count: float, name: str, sums: JointSums,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(values, weight, mean, var)
        ctx.eps, ctx.count, ctx.name, ctx.sums = eps, count, name, sums
        # torch's kernel for given statistics, as in eval()
        return torch.batch_norm(values, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, var = ctx.saved_tensors
        if len(values):
            direct, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, values, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        else:  # torch's kernel divides by the number of values
            direct, by_weight, by_bias = values.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
        if ctx.needs_input_grad[0]:
            through_mean, through_var = _joint_gradients(ctx.name, ctx.sums, by_bias, by_weight)
            scale = (var + ctx.eps).rsqrt()
            factor = (scale if weight is None else scale * weight.to(scale.dtype)) / ctx.count
            slope = factor * scale * through_var.to(scale.dtype)
            offset = factor * through_mean.to(scale.dtype) - mean * slope
            shape = [1, -1, *[1] * (values.dim() - 2)]
            direct = (direct - (values * slope.view(shape) + offset.view(shape))).to(values.dtype)
        own = [direct, by_weight if weight is not None else None, by_bias]
        return *(each if needed else None for each, needed in zip(own, ctx.needs_input_grad, strict=False)), *[None] * 6


def _joint_gradients(name: str, sums: JointSums, *own: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums over all workers of these vectors by channel, each worker's by its part of the examples."""
    part = sums.part or 1.0  # a worker without examples has a gradient of no weight
    joint = torch.cat([each.double() for each in own]) * part
    sums.sum_ranks(joint, f"backward of {name}")
    return list((joint / part).chunk(len(own)))
