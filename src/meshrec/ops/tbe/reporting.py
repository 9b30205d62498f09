"""An operator that warns about IDs replaced by ``clamp_ids``.

A compiled graph cannot read a count on the host, but it can call an operator that does. The operator runs in
Python on every device. It has a separate namespace, because ``schemas.inc`` lists all of ``meshrec``.
"""

import logging

import torch
from torch import Tensor

_logger = logging.getLogger("meshrec")


def report_clamped(total: Tensor, counts: Tensor, names: Tensor) -> None:
    r"""Add the number of IDs replaced by ``clamp_ids`` to a running total. Log a warning the first time.

    Args:
        total: running total, int64 [1], modified in place.
        counts: number of replaced IDs per feature, int64 [F].
        names: UTF-8 bytes of ``"table\\tfeature\\n"`` per feature, uint8.
    """
    # Synchronizes if the counts are on a GPU.
    num_clamped = int(counts.sum())
    # Only the first time, as long as the total is 0.
    if num_clamped and not int(total):
        table, feature = bytes(names.tolist()).decode().split("\n")[int(counts.argmax())].split("\t")
        _logger.warning(
            "%d IDs lie outside their table, most of them in feature %r for table %r; row 0 is "
            "read instead. This warning appears once; num_clamped_ids has the total.",
            num_clamped,
            feature,
            table,
        )
    total += num_clamped


def _register() -> torch.library.Library:
    """Define the operator ``torch.ops.meshrec_host.report_clamped``."""
    library = torch.library.Library("meshrec_host", "DEF")
    library.define("report_clamped(Tensor(a!) total, Tensor counts, Tensor names) -> ()")
    library.impl("report_clamped", report_clamped, "CompositeExplicitAutograd")
    library._register_fake("report_clamped", lambda *_: None)
    return library


# torch.library.Library unregisters its operators when garbage collected, so keep a reference.
_registration = _register()
