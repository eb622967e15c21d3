"""BatchNorm in local training: batch statistics without padding."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flcore.core.errors import ConfigError
from flcore.experiment.experiment import Experiment


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a BatchNorm layer normalises with the mini-batch's statistics now."""
    return any(layer.training for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))


def refuse_single_batches(experiment: Experiment, module: nn.Module) -> None:
    """Raise ConfigError if BatchNorm would train on batches of one."""
    has_batchnorm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    if has_batchnorm and experiment.config.local.batch_size == 1 and experiment.batchnorm != "frozen":
        raise ConfigError(
            "local.batch_size = 1: BatchNorm needs 2 samples or more; change it, or set model.batchnorm=frozen"
        )


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm with batch statistics without padding; PyTorch's own with ``mask`` None.

    Samples after the mask's are extra inputs and count.
    """

    mask: Tensor | None

    def _check_input_dim(self, values: Tensor) -> None:
        """Accept 2 to 5 dimensions."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalise [B, C, ...]; in training mode with the statistics of samples of mask 1, mask [B]."""
        if self.mask is None or not self.training:
            return super().forward(values)
        over = [0, *range(2, values.ndim)]
        shape = (1, -1) + (1,) * (values.ndim - 2)
        mask = torch.cat([self.mask, self.mask.new_ones(values.shape[0] - self.mask.shape[0])])
        count = mask.sum() * (values[0, 0].numel() if values.ndim > 2 else 1)
        mask = mask.reshape((-1,) + (1,) * (values.ndim - 1))
        mean = (values * mask).sum(over) / count
        centred = values - mean.reshape(shape)
        variance = (centred.square() * mask).sum(over) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp_min(1))
                share = self.momentum or 0.0
                self.running_mean.mul_(1 - share).add_(mean, alpha=share)
                self.running_var.mul_(1 - share).add_(unbiased, alpha=share)
                self.num_batches_tracked.add_(1)
        normalised = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is None:
            return normalised
        return normalised * self.weight.reshape(shape) + self.bias.reshape(shape)


def maskable(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer of a module, in place, by :class:`MaskedBatchNorm`."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            if layer.momentum is None:
                raise ConfigError("engine.stack: BatchNorm with a cumulative average cannot be stacked")
            layer.__class__ = MaskedBatchNorm
            cast(MaskedBatchNorm, layer).mask = None
    return module
