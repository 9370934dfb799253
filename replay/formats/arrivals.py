"""Arrival processes and length distributions by name, for synthetic workloads."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.errors import ConfigError, did_you_mean

Doubles = npt.NDArray[np.float64]
_PARAMETERS = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "weibull": ("rate", "cv"),
    "constant": ("rate",),
    "burst": ("rate", "size"),
    "at-once": (),
}


@dataclass(frozen=True)
class ArrivalProcess:
    """An arrival process with ``rate`` requests per second; ``str`` returns its spec."""

    kind: str
    parameters: Mapping[str, float]

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.parameters.values())])

    def times(self, count: int, random: np.random.Generator) -> Doubles:
        """Return the times of ``count`` arrivals in seconds from 0, ascending."""
        if self.kind == "at-once":
            return np.zeros(count)
        rate = self.parameters["rate"]
        if self.kind == "constant":
            return np.arange(count, dtype=np.float64) / rate
        if self.kind == "burst":
            size = int(self.parameters["size"])
            return np.arange(count) // size * np.float64(size / rate)
        cv = self.parameters.get("cv", 1.0)
        gaps = draw_gaps("weibull" if self.kind == "weibull" else "gamma", cv, count, random) / rate
        return np.cumsum(gaps) - (gaps[0] if count else 0.0)


def parse_arrivals(spec: str) -> ArrivalProcess:
    """Parse an arrival process.

    ``poisson:RATE``, ``gamma:RATE:CV``, ``weibull:RATE:CV``, ``constant:RATE``, ``burst:RATE:SIZE`` or ``at-once``.

    Raises:
        ConfigError: an invalid spec.
    """
    kind, *given = spec.split(":")
    if kind not in _PARAMETERS:
        known = ", ".join(_PARAMETERS)
        raise ConfigError(f"unknown arrival process {kind!r}{did_you_mean(kind, _PARAMETERS)}; known: {known}")
    names = _PARAMETERS[kind]
    if len(given) != len(names):
        raise ConfigError(f"arrivals {spec!r}: must be {':'.join([kind, *names]).upper().replace(kind.upper(), kind)}")
    parameters = {name: positive(text, f"arrivals {spec!r}: {name}") for name, text in zip(names, given, strict=True)}
    if "size" in parameters and not parameters["size"].is_integer():
        raise ConfigError(f"arrivals {spec!r}: size must be a whole number")
    return ArrivalProcess(kind, parameters)


def positive(text: str, what: str) -> float:
    """Parse a finite number above 0. Raises ConfigError, with ``what`` as the subject."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= 1e12):
        raise ConfigError(f"{what} must be a number above 0 (got {text!r})")
    return value


def draw_gaps(family: str, cv: float, count: int, random: np.random.Generator) -> Doubles:
    """Draw ``count`` gaps of mean 1 and coefficient of variation ``cv``, gamma or Weibull distributed."""
    if family == "gamma":
        shape = 1 / cv**2
        return random.gamma(shape, 1 / shape, count)
    shape = weibull_shape(cv)
    return random.weibull(shape, count) * math.exp(-math.lgamma(1 + 1 / shape))


def weibull_shape(cv: float) -> float:
    """Return the shape parameter for a coefficient of variation, by bisection of its logarithm.

    The coefficient of variation decreases as the shape grows.
    """

    def log_moments(shape: float) -> float:
        return math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)

    wanted = math.log1p(cv**2)
    low, high = math.log(0.02), math.log(500.0)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if log_moments(math.exp(middle)) > wanted else (low, middle)
    return math.exp(low)


Lengths = Callable[[int, np.random.Generator], npt.NDArray[np.int64]]
"""Draws lengths in tokens, given their number and a random generator."""


def parse_lengths(spec: str, what: str, largest: int) -> Lengths:
    """Parse a length distribution.

    ``fixed:N`` (or ``N``), ``uniform:LOW:HIGH`` (inclusive) or ``lognormal:MEAN:CV`` (at least 1 token).

    Raises:
        ConfigError: an invalid spec, or lengths above ``largest``.
    """
    kind, *given = spec.split(":") if ":" in spec else ("fixed", spec)
    counts = {"fixed": 1, "uniform": 2, "lognormal": 2}
    if kind not in counts:
        raise ConfigError(f"{what}: unknown distribution {kind!r}; known: fixed, uniform, lognormal, file")
    if len(given) != counts[kind]:
        raise ConfigError(f"{what}: must be fixed:N, uniform:LOW:HIGH, lognormal:MEAN:CV or file:PATH (got {spec!r})")
    numbers = [positive(text, f"{what}: {kind}") for text in given]
    if numbers[0] > largest or (kind == "uniform" and numbers[1] > largest):
        raise ConfigError(f"{what}: lengths must be at most {largest} tokens (got {spec!r})")
    if kind == "lognormal":
        mean, cv = numbers
        variance = math.log1p(cv**2)
        mu, sigma = math.log(mean) - variance / 2, math.sqrt(variance)
        return lambda n, random: np.clip(np.rint(random.lognormal(mu, sigma, n)), 1, largest).astype(np.int64)
    if not all(number.is_integer() for number in numbers):
        raise ConfigError(f"{what}: lengths must be whole numbers (got {spec!r})")
    low, high = int(numbers[0]), int(numbers[-1])
    if low > high:
        raise ConfigError(f"{what}: LOW must not exceed HIGH (got {spec!r})")
    return lambda n, random: random.integers(low, high, n, np.int64, endpoint=True)
