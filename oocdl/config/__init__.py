"""Options and settings: what each option is, how it is checked, and the settings that become of them."""

from oocdl.config.option_checks import flag, nearest, parse_bytes, parse_optimizer, shown, whole
from oocdl.config.options import OPTIONS
from oocdl.config.settings import Settings, differences, make_settings, plain

__all__ = [
    "OPTIONS", "Settings", "differences", "flag", "make_settings", "nearest", "parse_bytes",
    "parse_optimizer", "plain", "shown", "whole",
]  # fmt: skip
