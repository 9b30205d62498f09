"""Nodes of the wire benchmark: namespaces with a limited link between them."""

import subprocess

import pytest
import torch
import torch.distributed as dist

from benchmarks import wire_links
from meshrec.comms.host_link import open_link


def sum_and_links():
    """The sum of all ranks' numbers, and whether ranks of one node, and of both, read each other's memory."""
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number)
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inside = open_link(nodes[dist.get_rank() // 2]) is not None
    return number.item(), inside, open_link(dist.group.WORLD) is not None


@pytest.mark.skipif(wire_links.why_not() is not None, reason=f"needs nodes: {wire_links.why_not()}")
def test_ranks_of_two_nodes_meet_over_the_link():
    with wire_links.two_nodes() as nodes:
        nodes.limit(1.0)
        shown = subprocess.run(
            nodes.command(0, ["tc", "qdisc", "show", "dev", nodes.interface(0)]),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "tbf" in shown
        assert "rate 1Gbit" in shown
        found = wire_links.run_ranks(nodes, sum_and_links)
        name = nodes.command(0, [])[3]
    assert [number for number, *_ in found] == [6.0] * 4
    assert not any(across for *_, across in found)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in listed.split()
