"""Configured normalisation, as one value per channel."""

from __future__ import annotations

from flcore.core.errors import ConfigError
from flcore.core.text import to_yaml

ChannelValues = float | tuple[float, ...]
"""One number for all channels, or one for each."""

Normalisation = tuple[ChannelValues, ChannelValues]
"""Mean and standard deviation, on the scale 0 to 1."""


def of_channels(normalisation: Normalisation, channels: int, owner: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each of ``channels``; ``owner`` of the images is for errors.

    Raises:
        ConfigError: a list has not one value for each channel.
    """
    mean, std = normalisation
    return _each("mean", mean, channels, owner), _each("std", std, channels, owner)


def _each(key: str, values: ChannelValues, channels: int, owner: str) -> tuple[float, ...]:
    if not isinstance(values, tuple):
        return (values,) * channels
    if len(values) != channels:
        number = "1 channel" if channels == 1 else f"{channels} channels"
        raise ConfigError(
            f"data.{key} = {to_yaml(list(values))}: images of {owner} have {number}; give one number, or one for each"
        )
    return values
