import pytest
import torch

from meshrec.ops.versions import check_unchanged, versions_of


def test_a_write_in_place_is_found_and_named():
    tensors = [torch.zeros(2), None, torch.zeros(3)]
    before = versions_of(tensors)
    check_unchanged(("a", "b", "c"), tensors, before)
    tensors[2].add_(1)
    with pytest.raises(ValueError, match=r"^c changed in place.*clone\(\)"):
        check_unchanged(("a", "b", "c"), tensors, before)


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert versions_of([tensor, None]) == [-1, -1]
