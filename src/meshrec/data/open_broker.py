"""Brokers by their addresses."""

from pathlib import Path

from meshrec.data import kafka_broker, redis_broker
from meshrec.data.brokers import Broker

_SCHEMES = (*redis_broker.SCHEMES, *kafka_broker.SCHEMES)


def is_broker(address: str | Path) -> bool:
    """Return whether an address is that of Redis streams or Kafka topics."""
    scheme, separator, _ = str(address).partition("://")
    return bool(separator) and scheme in _SCHEMES


def open_broker(address: str) -> Broker:
    """Open the broker of an address. It connects at the first request.

    Args:
        address: ``redis://``, ``rediss://``, ``unix://`` or ``kafka://``.

    Raises:
        ValueError: the address has another scheme, or is wrong.
    """
    scheme = address.partition("://")[0]
    if scheme in redis_broker.SCHEMES:
        return redis_broker.RedisBroker(address)
    if scheme in kafka_broker.SCHEMES:
        return kafka_broker.KafkaBroker(address)
    raise ValueError(f"an address of streams has a scheme of {[*_SCHEMES]}, got {scheme!r}.")
