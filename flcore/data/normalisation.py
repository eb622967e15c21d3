"""What images are normalised with where a configuration says so, brought to one value per channel."""

from __future__ import annotations

from flcore.core.errors import ConfigError
from flcore.core.text import to_yaml

ChannelValues = float | tuple[float, ...]
"""One number for all channels, or one for each."""

Normalisation = tuple[ChannelValues, ChannelValues]
"""Mean and standard deviation, on the scale 0 to 1."""


def of_channels(normalisation: Normalisation, channels: int, whose: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each of ``channels``.

    Args:
        normalisation: as configured. channels: of the images as they are trained on. whose: they are, for the error.

    Raises:
        ConfigError: a list that has not one value for each channel.
    """
    mean, std = normalisation
    return _each("mean", mean, channels, whose), _each("std", std, channels, whose)


def _each(key: str, values: ChannelValues, channels: int, whose: str) -> tuple[float, ...]:
    if not isinstance(values, tuple):
        return (values,) * channels
    if len(values) != channels:
        number = "1 channel" if channels == 1 else f"{channels} channels"
        raise ConfigError(
            f"data.{key} = {to_yaml(list(values))}: images of {whose} have {number}; give one number, or one for each"
        )
    return values
