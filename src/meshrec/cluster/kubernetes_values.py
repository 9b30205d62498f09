"""Check values for Kubernetes manifests early, before the cluster rejects or misunderstands them."""

import re
from decimal import Decimal

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_QUANTITY = re.compile(rf"\+?{_NUMBER}(?:([eE][+-]?[0-9]+)|([A-Za-z]*))")
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: 1000**power for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES = {"": 1, **_BINARY, **_DECIMAL}
_MIN_BYTES = 1 << 20  # a smaller quantity probably lacks the suffix
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The distribution/reference grammar: [HOST[:PORT]/]PATH[:TAG][@DIGEST].
_HOST = r"(?:[A-Za-z0-9]|[A-Za-z0-9][-A-Za-z0-9]*[A-Za-z0-9])"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_HOST}(?:\.{_HOST})*(?::[0-9]+)?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*:[0-9a-fA-F]{32,})?"
)


def check_bytes(option: str, text: str) -> int:
    """Return the bytes in a Kubernetes quantity. For example, "8Gi" is 8 * 2 ** 30, and "8G" is 8 * 10 ** 9.

    Raises:
        ValueError: the text is not a whole number of bytes, or is below 1 MiB. The message suggests a value.
    """
    # Spaces are removed only to suggest a value; the last condition rejects them.
    match = _QUANTITY.fullmatch(text.replace(" ", ""))
    if match is None or not (match[2] or match[3] in _SUFFIXES) or text != match[0]:
        raise ValueError(
            f"{option} is {text!r}; it must be a number of bytes with one of the suffixes "
            f"{', '.join(_BINARY)} (powers of 1024) or {', '.join(_DECIMAL)} (of 1000).{_suggestion(match)}"
        )
    size = Decimal(f"{match[1]}{match[2]}") if match[2] else Decimal(match[1]) * _SUFFIXES[match[3]]
    if size < _MIN_BYTES or size % 1:
        meant = "" if match[2] or match[3] else f" Did you mean {match[1]}Gi?"
        raise ValueError(
            f"{option} is {text!r}, {size.normalize():f} bytes; it must be whole bytes, at least 1Mi.{meant}"
        )
    return int(size)


def _suggestion(match: "re.Match[str] | None") -> str:
    """Return a suggestion such as " Did you mean 8Gi?" for "8g", "8GB" and "8 GiB"; else an empty string."""
    if match is None or match[2] or not match[3] or f"{match[3][0].upper()}i" not in _BINARY:
        return ""
    return f" Did you mean {match[1]}{match[3][0].upper()}i?"


def check_cpus(option: str, text: str) -> None:
    """Raise ValueError unless ``text`` is a positive number of cores, such as "4", "0.5" or "500m"."""
    match = _QUANTITY.fullmatch(text)
    cores = Decimal(0)
    if match is not None and match[2] is None and match[3] in ("", "m"):
        cores = Decimal(match[1]) / (1000 if match[3] else 1)
    # Kubernetes rounds to thousandths of a core.
    if cores <= 0 or cores * 1000 % 1:
        meant = f" Did you mean {match[1]}?" if match is not None and match[3] else ""
        raise ValueError(
            f"{option} is {text!r}; it must be a number of cores, such as 4, 0.5 or 500m (thousandths), and "
            f"a multiple of 1m.{meant}"
        )


def check_name(option: str, text: str, max_length: int = 63, *, dots: bool = False) -> None:
    """Check the name of a Kubernetes object.

    Args:
        option: option name, for the error message.
        text: name of the object.
        max_length: maximum number of characters.
        dots: whether the name may be a DNS subdomain, as for Secrets and claims, instead of a DNS label.

    Raises:
        ValueError: Kubernetes would reject the name.
    """
    if not (_SUBDOMAIN if dots else _LABEL).fullmatch(text) or len(text) > max_length:
        start = "a letter or a digit" if dots else "a letter"
        raise ValueError(
            f"{option} is {text!r}; it must have at most {max_length} lower-case letters, digits, "
            f"{'dots ' if dots else ''}and dashes, start with {start} and end with a letter or a digit."
        )


def check_image(option: str, text: str) -> None:
    """Raise ValueError if ``text`` is not a container image reference."""
    if not _IMAGE.fullmatch(text):
        raise ValueError(
            f"{option} is {text!r}; it must be [HOST[:PORT]/]PATH[:TAG][@DIGEST], with the path in lower "
            "case: meshrec:1 or ghcr.io/team/meshrec:1."
        )


def check_variable(option: str, text: str) -> None:
    """Raise ValueError if ``text`` is not an environment variable name."""
    if not _VARIABLE.fullmatch(text):
        raise ValueError(
            f"{option}: {text!r} is not a variable name; it must have letters, digits and underscores."
        )


def check_counts(min_value: int, **counts: int) -> None:
    """Raise ValueError if a count is below ``min_value``."""
    for name, count in counts.items():
        if count < min_value:
            raise ValueError(f"{name} is {count}; it must be at least {min_value}.")
