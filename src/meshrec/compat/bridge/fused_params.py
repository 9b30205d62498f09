"""``fused_params`` keys of TorchRec's quantized sharders, and TorchRec's global device switch.

All are accepted without effect.
"""

FUSED_PARAM_REGISTER_TBE_BOOL = "__register_tbes_in_named_modules"
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_TBE_ROW_ALIGNMENT = "__register_tbe_row_alignment"
FUSED_PARAM_BOUNDS_CHECK_MODE = "__register_tbe_bounds_check_mode"
FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP = "__register_lengths_to_offsets_lookup"

_propagates = False


def set_propogate_device(val: bool) -> None:
    """Set the switch. It has no effect: lookups always run on the device of their rows."""
    global _propagates
    _propagates = val


def get_propogate_device() -> bool:
    """Return the switch."""
    return _propagates
