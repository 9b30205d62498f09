"""Hardware profiles: speeds with which the cost model converts bytes and rows to seconds."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshrec.plan.text import read_json


@dataclass(frozen=True, kw_only=True)
class Link:
    """Latency and bandwidth of the connection between ranks, within a node or between nodes.

    Attributes:
        latency: seconds before the first byte of any collective.
        all_to_all: bytes/s sent, and at the same time received, by a rank in an all-to-all.
        reduce_scatter: bytes/s per rank in a reduce-scatter or all-gather.
        all_reduce: bytes/s per rank in an all-reduce, counting ``2 (n - 1) / n`` times the buffer (NCCL's
            "bus bandwidth").
    """

    latency: float
    all_to_all: float
    reduce_scatter: float
    all_reduce: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0 and not (name == "latency" and value == 0):
                raise ValueError(f"Link.{name} is {value}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A node's disk, for tables that are kept in files because they exceed the memory.

    Attributes:
        num_bytes: bytes available for files.
        reads: random record reads per second; None: use the hardware profile's rate.
        writes: random record writes per second; None: use the hardware profile's rate.
    """

    num_bytes: int
    reads: float | None = None
    writes: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_bytes", "reads", "writes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Disk.{name} is {value}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Speed and memory of a rank, and speed of the links between ranks.

    ``meshrec calibrate`` measures a profile of the current machine; `BUILTIN_PROFILES` has profiles of common
    machines. Costs are in seconds, bandwidths in bytes/s.

    Attributes:
        name: profile name, shown in reports.
        device: ``cpu`` or ``cuda``.
        read_row_seconds: fixed cost per random row read, for the ID and the unused part of a memory access.
        read_bandwidth: bytes/s in random row reads.
        update_row_seconds: fixed cost per distinct row in an update.
        update_bandwidth: bytes/s in updates, counting both read and write.
        update_id_seconds: cost per ID of sorting and summing gradients, without reading the gradients.
        route_id_seconds: cost per ID of writing it to a message and reading it at the receiver.
        split_id_seconds: additional cost per ID if the table's rows are on several ranks.
        scan_id_seconds: cost per ID of checking and counting a rank's batch, which every plan pays.
        scan_bag_seconds: cost per bag of the same scan.
        statistics_seconds: fixed cost per column shard for the exchange of row statistics.
        stream_bandwidth: bytes/s in sequential reads or writes.
        kernel_seconds: fixed cost of a lookup or update, or of routing on a single rank.
        intra: link within a node (axis ``local``).
        inter: link between nodes (axis ``node``).
        full_duplex: whether a rank sends and receives at the same time.
        sorts_once: whether updates of a column-split table reuse the IDs sorted for row statistics, as the
            CPU kernels do. Otherwise row gradients are summed to memory and read again.
        memory: bytes per rank for tables, buffers and the dense model.
        disk_reads: records in table files read per second by a node's disk, at random; 0: not measured.
        disk_writes: records written per second, at random; 0: not measured.
        sources: where the value of a field comes from, by field name: a data sheet, a measurement, or an
            assumption.
    """

    name: str
    device: str
    read_row_seconds: float
    read_bandwidth: float
    update_row_seconds: float
    update_bandwidth: float
    update_id_seconds: float
    route_id_seconds: float
    split_id_seconds: float = 0.0
    scan_id_seconds: float = 0.0
    scan_bag_seconds: float = 0.0
    statistics_seconds: float = 0.0
    stream_bandwidth: float
    kernel_seconds: float
    intra: Link
    inter: Link
    full_duplex: bool = True
    sorts_once: bool = False
    memory: int
    disk_reads: float = 0.0
    disk_writes: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"HardwareProfile.device is {self.device!r}; use 'cpu' or 'cuda'.")
        for name in ("read_bandwidth", "update_bandwidth", "stream_bandwidth", "memory"):
            # Written with `not`, so that NaN is rejected, too.
            if not getattr(self, name) > 0:
                raise ValueError(f"HardwareProfile.{name} is {getattr(self, name)}; it must be positive.")
        for name in self.__dataclass_fields__:
            if name.endswith("_seconds") and not getattr(self, name) >= 0:
                raise ValueError(f"HardwareProfile.{name} is {getattr(self, name)}; it must not be negative.")

    def with_bandwidths(self, intra: float | None, inter: float | None) -> "HardwareProfile":
        """Return a copy with other bandwidths within and between nodes; None keeps the current value."""
        return replace(
            self, intra=_with_bandwidth(self.intra, intra), inter=_with_bandwidth(self.inter, inter)
        )

    def named(self, name: str) -> "HardwareProfile":
        """Return a copy with the given name."""
        return replace(self, name=name)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {
            "intra": asdict(self.intra),
            "inter": asdict(self.inter),
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "HardwareProfile":
        """Parse `to_json` output.

        Raises:
            ValueError: unknown or missing fields.
        """
        # Fields with defaults may be missing, so that older files can be read.
        fields = set(cls.__dataclass_fields__)
        optional = {
            name for name, attribute in cls.__dataclass_fields__.items() if attribute.default is not MISSING
        }
        # `sources` is named here because a field with a default factory has no `default`.
        unknown, missing = set(values) - fields, fields - set(values) - optional - {"sources"}
        if unknown or missing:
            raise ValueError(
                f"a hardware profile has the fields {sorted(fields)}; unknown: {sorted(unknown)}, missing: "
                f"{sorted(missing)}. Measure a profile with `meshrec calibrate`."
            )
        return cls(**{**values, "intra": Link(**values["intra"]), "inter": Link(**values["inter"])})

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, replacing an existing file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "HardwareProfile":
        """Read `save` output.

        Raises:
            ValueError: not a hardware profile.
        """
        values = read_json(path, "a hardware profile, as `meshrec calibrate` writes it")
        try:
            return cls.from_json(values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a hardware profile; use a file of `meshrec calibrate`. Cause: {error}"
            ) from error


def _with_bandwidth(link: Link, bandwidth: float | None) -> Link:
    """Return a copy with this bandwidth in all collectives, or the link itself if `bandwidth` is None."""
    if bandwidth is None:
        return link
    return replace(link, all_to_all=bandwidth, reduce_scatter=bandwidth, all_reduce=bandwidth)


def _gpu(
    *,
    name: str,
    memory_gib: int,
    hbm: float,
    hbm_source: str,
    nvlink: float,
    nvlink_source: str,
    nic: float,
    nic_source: str,
) -> HardwareProfile:
    """Build a GPU profile from data sheet figures: peak rates times a typical efficiency.

    Args:
        nvlink: peak NVLink bandwidth per GPU and direction in bytes/s.
        nic: peak network bandwidth per GPU and direction in bytes/s.
    """
    # Efficiencies are assumed, not measured; `sources` tells the user.
    rows, stream, links = 0.65 * hbm, 0.85 * hbm, 0.8
    assumption = "assumed for all GPUs; run `meshrec calibrate` for your own"
    return HardwareProfile(
        name=name,
        device="cuda",
        read_row_seconds=64 / rows,
        read_bandwidth=rows,
        update_row_seconds=128 / rows,
        update_bandwidth=rows,
        update_id_seconds=96 / stream,
        route_id_seconds=96 / stream,
        stream_bandwidth=stream,
        kernel_seconds=10e-6,
        intra=Link(
            latency=20e-6, all_to_all=links * nvlink, reduce_scatter=links * nvlink, all_reduce=links * nvlink
        ),
        inter=Link(latency=40e-6, all_to_all=links * nic, reduce_scatter=links * nic, all_reduce=links * nic),
        memory=memory_gib * 1024**3,
        sources={
            "memory": hbm_source,
            "read_bandwidth": f"65 % of the peak of {hbm_source} ({assumption})",
            "update_bandwidth": f"65 % of the peak of {hbm_source} ({assumption})",
            "stream_bandwidth": f"85 % of the peak of {hbm_source} ({assumption})",
            "read_row_seconds": f"64 bytes: an 8-byte id and partly used 32-byte sectors ({assumption})",
            "update_row_seconds": f"128 bytes: state's sectors, read and written ({assumption})",
            "update_id_seconds": f"96 bytes: four radix passes over 12-byte pairs ({assumption})",
            "route_id_seconds": f"the bytes of sorting an id ({assumption})",
            "kernel_seconds": f"a few launches ({assumption})",
            "intra": f"80 % of {nvlink_source} per direction; latency {assumption}",
            "inter": f"80 % of {nic_source} per direction; latency {assumption}",
        },
    )


# Peak rates only. Efficiencies are assumed equal on all GPUs, see `_gpu`.
_A100 = _gpu(
    name="a100",
    memory_gib=80,
    hbm=2.039e12,
    hbm_source="NVIDIA A100 80GB SXM data sheet: 80 GB HBM2e, 2039 GB/s",
    nvlink=300e9,
    nvlink_source="NVIDIA A100 data sheet: NVLink 600 GB/s, 300 GB/s",
    nic=25e9,
    nic_source="NVIDIA DGX A100 data sheet: 8 x 200 Gb/s, 25 GB/s per GPU",
)
_H100 = _gpu(
    name="h100",
    memory_gib=80,
    hbm=3.35e12,
    hbm_source="NVIDIA H100 SXM data sheet: 80 GB HBM3, 3.35 TB/s",
    nvlink=450e9,
    nvlink_source="NVIDIA H100 data sheet: NVLink 900 GB/s, 450 GB/s",
    nic=50e9,
    nic_source="NVIDIA DGX H100 data sheet: 8 x 400 Gb/s, 50 GB/s per GPU",
)
_H200 = _gpu(
    name="h200",
    memory_gib=141,
    hbm=4.8e12,
    hbm_source="NVIDIA H200 SXM data sheet: 141 GB HBM3e, 4.8 TB/s",
    nvlink=450e9,
    nvlink_source="NVIDIA H200 data sheet: NVLink 900 GB/s, 450 GB/s",
    nic=50e9,
    nic_source="NVIDIA DGX H200 data sheet: 8 x 400 Gb/s, 50 GB/s per GPU",
)
_CALIBRATED = (
    "`meshrec calibrate` with 2 ranks of one thread on a virtual machine with 2 cores of an AMD EPYC (Zen 5, "
    "AVX-512); where more ranks share a memory, each gets less of it, and more threads make a rank faster"
)
_KERNEL_FIGURES = tuple(
    name for name in HardwareProfile.__dataclass_fields__ if name.endswith(("_seconds", "_bandwidth"))
)
# Measured, except for the memory and the network, which are assumptions.
_CPU = HardwareProfile(
    name="cpu",
    device="cpu",
    read_row_seconds=2e-9,
    read_bandwidth=21e9,
    update_row_seconds=2e-9,
    update_bandwidth=20e9,
    update_id_seconds=10e-9,
    route_id_seconds=1e-9,
    split_id_seconds=6e-9,
    scan_id_seconds=4e-9,
    scan_bag_seconds=4e-9,
    statistics_seconds=14e-6,
    stream_bandwidth=23e9,
    kernel_seconds=150e-6,
    intra=Link(latency=130e-6, all_to_all=30e9, reduce_scatter=2.5e9, all_reduce=1e9),
    inter=Link(latency=400e-6, all_to_all=1e9, reduce_scatter=1e9, all_reduce=1e9),
    full_duplex=False,
    sorts_once=True,
    memory=32 * 1024**3,
    sources={
        **dict.fromkeys(_KERNEL_FIGURES, _CALIBRATED),
        "intra": f"ranks of one host read each other's memory, all-reduce is gloo's: {_CALIBRATED}",
        "inter": "gloo over a 10 Gb/s network, order of magnitude; run `meshrec calibrate` for your own",
        "memory": "an assumption; give Topology(ddr_cap=...)",
    },
)

BUILTIN_PROFILES: Mapping[str, HardwareProfile] = MappingProxyType(
    {profile.name: profile for profile in (_CPU, _A100, _H100, _H200)}
)
"""Profiles by name: ``cpu``, ``a100``, ``h100``, ``h200`` (nodes of up to 8 GPUs).

`HardwareProfile.sources` tells where the values come from.
"""


def get_profile(name: str) -> HardwareProfile:
    """Return a built-in profile, or load a file written by `HardwareProfile.save`.

    Raises:
        ValueError: ``name`` is neither.
    """
    if name in BUILTIN_PROFILES:
        return BUILTIN_PROFILES[name]
    if Path(name).is_file():
        return HardwareProfile.load(name)
    raise ValueError(
        f"hardware profile {name!r}: neither a file nor one of {sorted(BUILTIN_PROFILES)}. "
        "Name one of these, or write a file with `meshrec calibrate`."
    )


def with_memory(profile: HardwareProfile, memory: int) -> HardwareProfile:
    """Return a copy with `memory` bytes per rank."""
    return replace(profile, memory=memory)
