"""Numbers as people write them: `2Mi` tokens, `141` GiB."""

import re

from ..errors import ConfigError

GIB = 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_count(text: str) -> int:
    """A whole number with an optional unit: `8Ki` is 8,192, `2M` two million.

    Raises:
        ConfigError: not such a number.
    """
    found = re.fullmatch(r"\s*([\d_,]*\.?\d+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(
            f"{text!r} is no size: a number with one of the units k, M, G (powers of 1,000), Ki, "
            "Mi, Gi (powers of 1,024) is needed, as in 2Mi, 8Ki or 100000."
        )
    value = float(re.sub("[_,]", "", found[1])) * _UNITS[found[2].lower()]
    if value < 1 or value != int(value):
        raise ConfigError(f"{text!r} is {value:,}: a whole number of at least 1 is needed.")
    return int(value)


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two digits."""
    return f"{num_bytes / GIB:,.2f}"
