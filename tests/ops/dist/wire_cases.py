"""Messages of drawn rows, as both test_wire.py and the program that it interprets make them."""

import itertools
import os

import torch

from meshrec.ops.dist.wire_naive import BFLOAT16, FLOAT, HALF, INT4, INT8, STOCHASTIC

FORMATS = [FLOAT, HALF, BFLOAT16, INT8, INT4, INT8 | STOCHASTIC, INT4 | STOCHASTIC]


def drawn_rows(num_rows, dim, seed=0):
    """Rows of very different sizes, some of them constant, tiny, huge, or with values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.empty(num_rows, 1).uniform_(-42, 38, generator=generator)
    rows = torch.randn(num_rows, dim, generator=generator).clamp(-3, 3) * sizes.clamp(max=1e38)
    rows += torch.randn(num_rows, 1, generator=generator) * (torch.arange(num_rows) % 3 == 0)[:, None]
    rows[1::17] = rows[1::17, :1]
    rows[2::17] = 0.0
    rows[3::17] *= 1e-7
    if dim > 1:
        rows[4::17, 0], rows[4::17, 1] = 3.4e38, -3.4e38
    for first, value in ((5, torch.inf), (6, -torch.inf), (7, torch.nan)):
        rows[first::37, dim // 2] = value
    rows[8::37] = torch.inf
    rows[9::37, 0], rows[9::37, -1] = torch.inf, -torch.inf
    return rows


def long_messages():
    """Arguments of ``wire_encode``: more rows than a kernel encodes at once, and wide ones; in each half of
    the rows, some or no values are not finite.
    """
    seed = int(os.environ.get("MESHREC_SEED", "0"))
    for format, dim in itertools.product(FORMATS[3:], (4, 31, 64, 100, 128, 300, 1100)):
        rows = drawn_rows(150, dim, seed=seed + dim)
        rows[:75] = rows[:75].nan_to_num(1.0, 2.0, 3.0)
        yield (
            rows.flatten(),
            [50, 0, 50],
            [0, 2, 2, 3],
            [dim] * 3,
            [format] * 3,
            [5] * 3,
            [3] * 3,
            [7] * 3,
            None,
            1,
        )


def high_halves():
    """Arguments of ``wire_encode`` in every format: all 65,536 upper halves of fp32, with four lower halves.

    So there are all subnormals, infinities and NaNs that bf16 has, and many that fp16 has. The width is no
    multiple of a vector.
    """
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    bits = torch.cat([halves | low for low in (0, 1, 0x8000, 0xFFFF)])
    values = bits.view(torch.float32)[: len(bits) // 77 * 77]
    for format in FORMATS:
        yield values, [len(values) // 77], [0, 1], [77], [format], [5], [3], [9], None, 1


def messages(num_rows=40):
    """Arguments of ``wire_encode``: every format alone at several widths, and mixtures."""
    for format, dim in itertools.product(FORMATS, (1, 3, 16, 64, 77)):
        rows = drawn_rows(num_rows, dim, seed=dim)
        yield rows.flatten(), [num_rows], [0, 1], [dim], [format], [5], [3], [1 << 40], None, 7
    columns = [6, 8, 3, 16], [INT8, FLOAT, INT4 | STOCHASTIC, HALF]
    rows = torch.cat([drawn_rows(9, 33).clamp(-6e4, 6e4), drawn_rows(4, 33, 1).clamp(-6e4, 6e4)])
    values = torch.cat([rows[:9].flatten(), rows[9:].nan_to_num()[:, :9].flatten()]).nan_to_num()
    keys = torch.arange(13) * 3 - 5
    widths, formats = columns[0] + [5, 4], columns[1] + [INT4, INT8 | STOCHASTIC]
    layout = [9, 0, 4], [0, 4, 4, 6], widths, formats
    yield values, *layout, list(range(6)), [0, 6, 0, 3, 1, 2], [0, 5, 1 << 40], keys, 3
    yield torch.empty(0), [], [0], [], [], [], [], [], None, 0
